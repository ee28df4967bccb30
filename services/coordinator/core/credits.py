"""Nodes by free credits, so that finding the one with the most costs the same with ten nodes and with ten thousand."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.coordinator.core.membership import Node


class CreditIndex:
    """The nodes of one role that may take leases. A credit is one lease that a node would still take; ``total`` is the sum over all nodes.

    Bucket ``n`` holds the nodes with ``n`` free credits, least recently changed first, so equal nodes take turns.
    """

    def __init__(self) -> None:
        self.total = 0
        self._free: dict[str, int] = {}  # by node id
        self._buckets: list[dict[str, Node]] = [{}]
        self._top = 0  # no bucket above it has a node

    def __contains__(self, node_id: str) -> bool:
        return node_id in self._free

    def set(self, node: Node, free: int) -> None:
        """``node`` has ``free`` credits from now on; none if that is negative."""
        free = max(0, free)
        before = self._free.get(node.node_id)
        if before == free:
            return
        if before is not None:
            del self._buckets[before][node.node_id]
            self.total -= before
        while len(self._buckets) <= free:
            self._buckets.append({})
        self._buckets[free][node.node_id] = node
        self._free[node.node_id] = free
        self.total += free
        self._top = max(self._top, free)

    def remove(self, node: Node) -> None:
        """``node`` takes no leases any more: it is gone, or its weights are old."""
        if (free := self._free.pop(node.node_id, None)) is not None:
            del self._buckets[free][node.node_id]
            self.total -= free

    def best(self, *, avoid: Container[str] = (), skip: Callable[[Node], bool] | None = None) -> Node | None:
        """The node with the most free credits that ``skip`` does not rule out; None: there is none.

        Nodes in ``avoid`` are taken only if the index has no other, be it busy.
        """
        while self._top and not self._buckets[self._top]:
            self._top -= 1
        if avoid and all(node_id in avoid for node_id in self._free):
            avoid = ()
        for free in range(self._top, 0, -1):
            for node_id, node in self._buckets[free].items():
                if not (avoid and node_id in avoid) and not (skip and skip(node)):
                    return node
        return None
