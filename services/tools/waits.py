"""``forebay waits``: who waits for what, on whom, since when, and for how long still; and the circles among them."""

from __future__ import annotations

import json
import time

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from common.wait_graph import WaitRow, cycle_text
from protocol.security import Keys
from services.tools.status import Status, fetch, plain_console

AGAIN_S = 1.0


def main(address: str, *, keys: Keys | None, as_json: bool, watch: bool) -> int:
    """Body of ``forebay waits``.

    Raises:
        PeerError: nobody answers.
    """
    status = fetch(address, keys=keys)
    if as_json:
        print(json.dumps({"waits": status["waits"], "cycles": status["cycles"]}, indent=1))
        return 0
    console = plain_console()
    if not watch:
        console.print(render(status))
        return 0
    with Live(render(status), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(AGAIN_S)
            live.update(render(fetch(address, keys=keys)), refresh=True)


def render(status: Status) -> RenderableType:
    """One table, the longest wait first, and a line for each circle."""
    table = Table(title=f"Run {status['run_id']}: {status['state']}, step {status['version']}", title_justify="left")
    for name in ("who", "waits for", "from", "since", "left", "limit"):
        table.add_column(name, justify="right" if name in ("since", "left") else "left", overflow="fold")
    for wait in status["waits"]:
        row = WaitRow(**wait)
        left_s = row.deadline_s - row.age_s
        left = f"{left_s:.0f} s" if left_s >= 0 else f"{-left_s:.0f} s over"
        table.add_row(row.who, row.what, row.on, f"{row.age_s:.1f} s", left, row.limit_key)
    lines = [Text(cycle_text(cycle), style="bold red") for cycle in status["cycles"]]
    return Group(table, *lines) if status["waits"] else Group(Text("Nobody waits."), *lines)
