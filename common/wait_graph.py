"""Who waits on whom, over all processes of a run: rows, and the circles in them. Pure functions.

A node's waits arrive with its heartbeats, so a row is known to have been open until ``known_s_ago``. A circle is one only if all its
waits were open at one moment, for ``OVERLAP_S`` at least: then no row of it is old news that a message under way has overtaken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

OVERLAP_S = 2.0
MAX_CYCLES = 10  # with one engine in a circle all engines are: a few examples tell as much


@dataclass(frozen=True, slots=True)
class WaitRow:
    """``who`` waits for ``what`` from ``on`` (node ids and roles, separated by ", "). ``age_s`` counts up to now; ``deadline_s`` is the
    whole time that the wait may take; see ``waits.Wait`` for ``onward``."""

    who: str
    what: str
    on: str
    age_s: float
    deadline_s: float
    limit_key: str
    onward: bool = False
    known_s_ago: float = 0.0

    @property
    def text(self) -> str:
        """One line for people."""
        return f"{self.who} waits {self.age_s:.0f} s of {self.deadline_s:.0f} s ({self.limit_key}) for {self.what} from {self.on}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON; ``WaitRow(**row)`` is its inverse."""
        return asdict(self)


def longest_first(rows: Sequence[WaitRow]) -> list[WaitRow]:
    """The order in which people read them."""
    return sorted(rows, key=lambda row: -row.age_s)


def find_cycles(rows: Sequence[WaitRow], roles: Mapping[str, str]) -> list[list[str]]:
    """Circles of waits, each as the names along it, the first again at its end; at most ``MAX_CYCLES``, shortest first.

    ``roles`` has the role of each live node: a wait on a role is one on each of its nodes. Only ``onward`` waits count.
    """
    edges: dict[str, dict[str, WaitRow]] = {}
    for row in rows:
        if row.onward:
            for name in _resolve(row.on, roles):
                known = edges.setdefault(row.who, {}).get(name)
                if known is None or known.age_s < row.age_s:
                    edges[row.who][name] = row
    found: list[list[str]] = []
    for start in sorted(edges):
        _walk([start], [], edges, found)
    return sorted(found, key=lambda cycle: (len(cycle), cycle))[:MAX_CYCLES]


def cycle_text(cycle: Sequence[str]) -> str:
    """``cycle: a -> b -> a``."""
    return "cycle: " + " -> ".join(cycle)


def _resolve(on: str, roles: Mapping[str, str]) -> list[str]:
    names = []
    for name in on.split(", "):
        nodes = [node for node, role in roles.items() if role == name]
        names += nodes or [name]
    return names


def _walk(
    path: list[str], rows: list[WaitRow], edges: Mapping[str, Mapping[str, WaitRow]], found: list[list[str]]
) -> None:
    """Extend ``path`` by every wait of its last name. A circle is found from its smallest name only, so once."""
    for name, row in edges.get(path[-1], {}).items():
        if len(found) >= 4 * MAX_CYCLES or not _overlap([*rows, row]):
            continue
        if name == path[0]:
            found.append([*path, name])
        elif name > path[0] and name not in path:
            _walk([*path, name], [*rows, row], edges, found)


def _overlap(rows: Sequence[WaitRow]) -> bool:
    return min(row.age_s for row in rows) - max(row.known_s_ago for row in rows) >= OVERLAP_S
