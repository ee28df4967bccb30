"""The ledger: where every generated token and every admitted group went. It closes, or the run ends with an error.

    generated = received + in flight
    received  = trained + buffered + filtered + failed + duplicate + lost

``received`` is counted when a result or a count of discarded tokens arrives; the right-hand side when a group changes its status.
``buffered`` isn't a counter: it is summed over the groups at hand, so the equation compares two independent countings.
``lost`` is what a dead node was last heard to have in flight.

Which tokens of each rollout process are in the ledger stands in ``TokenCounts``, so that none is counted twice: over lost answers, cuts,
deaths and restarts. A process knows how many completion tokens it has *generated*, and how many of these are *settled*: in requests that
were answered. The journal has, in the transaction that changes the ledger, how many are *counted*. So at any time

    in flight      = generated - counted    as of its last heartbeat; when the node dies these are *lost* (written off)
    unacknowledged = counted - settled      when it joins again: the ledger has these, and their answers were lost

A node repeats a request until it is answered, so what is unacknowledged comes again, and of the next tokens that bring nothing new so many
are not counted. Which requests they belong to does not matter: when all have come, the sums are right. A node without work has no open
request, so none of its tokens is unacknowledged.

Tokens that a node generates after the last heartbeat before it dies are in no count, nor are those whose heartbeat reached only a
coordinator that died with it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from common.errors import InvariantError
from protocol.messages import Hello
from services.coordinator.core.effects import Effects
from services.coordinator.core.membership import Node

if TYPE_CHECKING:
    from services.coordinator.core.pool import Pool

KEPT_GONE = 10_000  # processes that have left: one that left before so many others does not come back
KEPT_WRITTEN_OFF = 1000  # likewise; all of them are one row of the journal
_KEY = "counted/"  # in the journal's meta, then the process


class Ledger(BaseModel):
    """Completion tokens (and groups) by what became of them, over the whole run."""

    model_config = ConfigDict(extra="forbid")

    received: int = 0
    trained: int = 0
    filtered: int = 0
    failed: int = 0
    duplicate: int = 0
    lost: int = 0
    groups_admitted: int = 0
    groups_trained: int = 0
    groups_filtered: int = 0
    groups_failed: int = 0

    def add_duplicate(self, num_tokens: int) -> None:
        """Tokens of a completion for a place that is filled or gone."""
        self.received += num_tokens
        self.duplicate += num_tokens

    def add_discarded(self, num_tokens: int) -> None:
        """Tokens that a node generated for a lease and gave up, or of a sample that was refused."""
        self.received += num_tokens
        self.failed += num_tokens

    def add_lost(self, num_tokens: int) -> None:
        """Tokens that a node had in flight when it died. Negative: it had not died."""
        self.received += num_tokens
        self.lost += num_tokens

    def check(self, *, buffered: int, live_groups: int) -> None:
        """Compare both sides.

        Raises:
            InvariantError: they differ; the message has every term.
        """
        accounted = self.trained + buffered + self.filtered + self.failed + self.duplicate + self.lost
        groups = self.groups_trained + live_groups + self.groups_filtered + self.groups_failed
        if accounted != self.received or groups != self.groups_admitted:
            raise InvariantError(
                f"The ledger does not close: {self.received} tokens received, {accounted} accounted for; "
                f"{self.groups_admitted} groups admitted, {groups} accounted for. "
                f"{self.model_dump()}, buffered={buffered}, live_groups={live_groups}."
            )


class TokenCounts:
    """See the module. ``meta`` is the journal's. The ledger of ``pool`` and the counts change together."""

    def __init__(self, pool: Pool, meta: Mapping[str, str], effects: Effects) -> None:
        self._pool, self._effects = pool, effects
        # Process -> counted tokens, of those that are not in the run: each may be cut off and come back.
        self._gone = {key.removeprefix(_KEY): int(count) for key, count in meta.items() if key.startswith(_KEY)}
        self.written_off: dict[str, int] = json.loads(meta.get("written_off", "{}"))  # the same -> tokens

    def join(self, node: Node, hello: Hello) -> None:
        """A process joins. If its tokens were written off, it was cut off and not dead: they will come."""
        node.counted_tokens = self._gone.pop(node.process, 0)
        if hello.open_leases and hello.settled_tokens >= 0:
            node.unacknowledged_tokens = max(0, node.counted_tokens - hello.settled_tokens)
        if back := self.written_off.pop(node.process, 0):
            self._pool.ledger.add_lost(-back)
            self._record_written_off()

    def leave(self, node: Node) -> None:
        """It is gone, and its tokens in flight are lost."""
        if lost := node.tokens_in_flight:
            self._pool.ledger.add_lost(lost)
            self.written_off[node.process] = lost
            self._record_written_off()
        if node.counted_tokens:
            self._gone[node.process] = node.counted_tokens
        while len(self._gone) > KEPT_GONE:
            process = next(iter(self._gone))
            del self._gone[process]
            self._effects.record("forget_meta", _KEY + process)

    def accepted(self, node: Node, num_tokens: int) -> None:
        """The pool has taken a sample of the node, and counted it."""
        self._note(node, num_tokens)

    def duplicate(self, node: Node, num_tokens: int) -> None:
        """A completion for a place that is filled, or gone."""
        self._pool.ledger.add_duplicate(self._new_of(node, num_tokens))

    def discarded(self, node: Node, num_tokens: int) -> None:
        """Generated for a lease that was given up, or for a sample that was refused."""
        self._pool.ledger.add_discarded(self._new_of(node, num_tokens))

    def repeated(self, node: Node, num_tokens: int) -> None:
        """A request came again whose answer is still known."""
        node.unacknowledged_tokens -= min(num_tokens, node.unacknowledged_tokens)

    def idle(self, node: Node) -> None:
        """It has no work: tokens that it generated and has not sent never come, and no request comes again."""
        node.unacknowledged_tokens = 0
        if num_tokens := node.tokens_in_flight:
            self.discarded(node, num_tokens)

    def _new_of(self, node: Node, num_tokens: int) -> int:
        """How many of a request's tokens the ledger lacks."""
        known = min(num_tokens, node.unacknowledged_tokens)
        node.unacknowledged_tokens -= known
        self._note(node, num_tokens - known)
        return num_tokens - known

    def _note(self, node: Node, num_tokens: int) -> None:
        if num_tokens:
            node.counted_tokens += num_tokens
            self._pool.keep_meta(_KEY + node.process, str(node.counted_tokens))

    def _record_written_off(self) -> None:
        recent = dict([*self.written_off.items()][-KEPT_WRITTEN_OFF:])
        self._pool.keep_meta("written_off", json.dumps(recent))
