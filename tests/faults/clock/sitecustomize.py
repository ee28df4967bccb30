"""Put on PYTHONPATH of a role, this makes Python's wall clock jump: a day ahead, then a day behind, then right again.

``FOREBAY_FAULT_CLOCK`` says when: ``AHEAD,BEHIND,RIGHT`` in seconds since the start of the process. Only ``time.time`` and
``time.time_ns`` jump: what C code reads (SQLite, ``datetime.now``) stays right, for setting a machine's clock needs root, and would
hit all that runs on it.
"""

import os
import time

_DAY_S = 86_400


def _install(ahead: float, behind: float, right: float) -> None:
    true_s, true_ns, started = time.time, time.time_ns, time.monotonic()

    def shift_s() -> int:
        age = time.monotonic() - started
        return 0 if age < ahead or age >= right else _DAY_S if age < behind else -_DAY_S

    time.time = lambda: true_s() + shift_s()
    time.time_ns = lambda: true_ns() + shift_s() * 10**9


if "FOREBAY_FAULT_CLOCK" in os.environ:
    _install(*map(float, os.environ["FOREBAY_FAULT_CLOCK"].split(",")))
