"""The coordinator as a pure function of messages and time: no I/O, no clock, no randomness. ``core.Core`` is the way in."""
