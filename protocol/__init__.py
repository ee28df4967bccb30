"""What travels between Forebay's processes. Imports no torch and no service."""
