"""Twins: samples of one group with the same text. One of them is judged at a time, and its verdict serves the others.

Policies repeat themselves, the more the longer they are trained: of a group of 16, half may be the same program. Pure bookkeeping
of what is at work; who has been judged is in the group itself, so after a restart there is nothing to restore here.
"""

from __future__ import annotations


class Twins:
    """Samples that wait for the result of a lease of the same text."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, str], list[int]] = {}  # (group, text) that is leased -> samples that wait for it
        self._leased: dict[str, tuple[int, str]] = {}  # by lease

    def begin(self, lease_id: str, group_id: int, text: str) -> None:
        """A sample of this text is judged under ``lease_id``."""
        self._leased[lease_id] = (group_id, text)
        self._held.setdefault((group_id, text), [])

    def hold(self, group_id: int, text: str, sample_index: int) -> bool:
        """Whether ``sample_index`` waits for a lease of its text from now on; False: there is none."""
        waiting = self._held.get((group_id, text))
        if waiting is None:
            return False
        if sample_index not in waiting:
            waiting.append(sample_index)
        return True

    def end(self, lease_id: str) -> list[int]:
        """The lease is over, whatever became of it: the samples that waited for it, in order."""
        key = self._leased.pop(lease_id, None)
        return [] if key is None else self._held.pop(key, [])
