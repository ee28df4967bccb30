"""Which tokens of each rollout process are in the ledger, so that none is counted twice: over lost answers, cuts, deaths and restarts.

A process knows how many completion tokens it has *generated*, and of how many it has heard that they are *settled*: the answers of
its requests. Here stands, as durable as the ledger and in the same transaction, how many are *counted*. So at any time

    in flight = generated - counted    as of its last heartbeat; what a dead node had of these is *lost* (written off)
    unheard   = counted - settled      when it joins again: the ledger has these, and their answers were lost

A node repeats a request until it is answered, so what is unheard comes again, and of the next tokens that bring nothing new so many are
not counted. Which requests they belong to needs no answer: when all have come, the sums are right. A node without work has no request
open, so nothing of its is unheard.

Tokens that a node generated after its last heartbeat before it died, or whose heartbeat only a coordinator heard that died too, stand
nowhere: nobody who lives knows of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from protocol.messages import Hello
from services.coordinator.membership import Node
from services.coordinator.pool import Pool
from services.coordinator.records import Record

KEPT_GONE = 10_000  # processes: who left so long ago does not come back
KEPT_WRITTEN_OFF = 1000  # likewise; all of them are one row of the journal
_KEY = "counted/"  # in the journal's meta, then the process


class TokenCounts:
    """See the module. ``meta`` is the journal's. Changes the ledger of ``pool``, and what stands here, together."""

    def __init__(self, pool: Pool, meta: Mapping[str, str]) -> None:
        self._pool = pool
        # Process -> counted tokens, of those that are not in the run: any of them may only be cut off.
        self._gone = {key.removeprefix(_KEY): int(count) for key, count in meta.items() if key.startswith(_KEY)}
        self.written_off: dict[str, int] = json.loads(meta.get("written_off", "{}"))  # the same -> tokens

    def join(self, node: Node, hello: Hello) -> None:
        """A process joins. If it was written off, it was cut off and not dead: what it had will come."""
        node.counted_tokens = self._gone.pop(node.process, 0)
        if hello.open_leases and hello.settled_tokens >= 0:
            node.unheard_tokens = max(0, node.counted_tokens - hello.settled_tokens)
        if back := self.written_off.pop(node.process, 0):
            self._pool.ledger.add_lost(-back)
            self._record_written_off()

    def leave(self, node: Node) -> None:
        """It is gone, and what it had in flight is lost."""
        if lost := node.tokens_in_flight:
            self._pool.ledger.add_lost(lost)
            self.written_off[node.process] = lost
            self._record_written_off()
        if node.counted_tokens:
            self._gone[node.process] = node.counted_tokens
        for process in list(self._gone)[:-KEPT_GONE]:
            del self._gone[process]
            self._pool.records.append(Record("forget_meta", (_KEY + process,)))

    def accepted(self, node: Node, num_tokens: int) -> None:
        """The pool has taken a sample of its, and counted it."""
        self._note(node, num_tokens)

    def duplicate(self, node: Node, num_tokens: int) -> None:
        """A completion for a place that is filled, or gone."""
        self._pool.ledger.add_duplicate(self._new_of(node, num_tokens))

    def thrown_away(self, node: Node, num_tokens: int) -> None:
        """Generated for a lease that was given up, or for a sample that was refused."""
        self._pool.ledger.add_thrown_away(self._new_of(node, num_tokens))

    def repeated(self, node: Node, num_tokens: int) -> None:
        """A request came again whose answer is still known."""
        node.unheard_tokens -= min(num_tokens, node.unheard_tokens)

    def idle(self, node: Node) -> None:
        """It has no work: what it generated and hasn't sent will never come, and nothing comes again."""
        node.unheard_tokens = 0
        if num_tokens := node.tokens_in_flight:
            self.thrown_away(node, num_tokens)

    def _new_of(self, node: Node, num_tokens: int) -> int:
        """So many of a request's tokens the ledger lacks."""
        known = min(num_tokens, node.unheard_tokens)
        node.unheard_tokens -= known
        self._note(node, num_tokens - known)
        return num_tokens - known

    def _note(self, node: Node, num_tokens: int) -> None:
        if num_tokens:
            node.counted_tokens += num_tokens
            self._pool.keep_meta(_KEY + node.process, str(node.counted_tokens))

    def _record_written_off(self) -> None:
        recent = dict([*self.written_off.items()][-KEPT_WRITTEN_OFF:])
        self._pool.keep_meta("written_off", json.dumps(recent))
