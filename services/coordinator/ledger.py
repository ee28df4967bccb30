"""The ledger: where every generated token and every admitted group went. It closes, or the run has an error.

    generated = received + in flight
    received  = trained + buffered + filtered + failed + duplicate + lost

``received`` is counted when a result or a thrown-away count arrives; the right-hand side when a group changes its status.
``buffered`` isn't a counter: it is summed over the groups at hand, so the equation compares two independent countings.
``lost`` is what a dead node was last heard to have in flight. That no token is received twice is the work of ``counts.py``.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from common.errors import InvariantError


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

    def add_thrown_away(self, num_tokens: int) -> None:
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
