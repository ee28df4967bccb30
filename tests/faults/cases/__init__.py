"""The cases of the suite by kind of fault; ``table.py`` has them all."""
