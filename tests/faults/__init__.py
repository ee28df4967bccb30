"""``make faults``: every kind of fault, injected into real processes, and what the system made of it."""
