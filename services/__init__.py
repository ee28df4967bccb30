"""The four roles of a run, the `forebay` command and `forebay up`."""
