"""What each process's last requests were answered: one that comes twice (its answer was lost, a frame was doubled) is done once.

Bounded twice: so many answers of a process, far more than it can have open, and so many processes that are gone, for they may only be cut off.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from protocol.messages import Message

KEPT_ANSWERS = 8192  # of each process
KEPT_PROCESSES = 64  # that are gone


class GivenAnswers:
    """By identity of the process, and its request's sequence number."""

    def __init__(self) -> None:
        self._answers: OrderedDict[bytes, OrderedDict[int, Message]] = OrderedDict()

    def join(self, identity: bytes, *, is_here: Callable[[bytes], bool]) -> None:
        """A process joins, maybe again; of those that are not in the run the oldest are forgotten."""
        self._answers.setdefault(identity, OrderedDict())
        self._answers.move_to_end(identity)
        for gone in [other for other in self._answers if not is_here(other)][:-KEPT_PROCESSES]:
            del self._answers[gone]

    def keep(self, identity: bytes, seq: int, answer: Message) -> None:
        """What request ``seq`` is answered. Of a process that never joined nothing is kept."""
        if (answers := self._answers.get(identity)) is not None:
            answers[seq] = answer
            if len(answers) > KEPT_ANSWERS:
                answers.popitem(last=False)

    def given(self, identity: bytes, seq: int) -> Message | None:
        """The answer of a request that was done before."""
        answers = self._answers.get(identity)
        return answers.get(seq) if answers else None
