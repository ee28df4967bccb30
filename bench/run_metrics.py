"""A finished run as a table: ``python -m bench.run_metrics RUN [--out FILE.md]``.

Reads the run's ``summary.json``, which the coordinator writes at the end; measures nothing itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from statistics import fmean, median
from typing import Any

COLUMNS = {
    "step": ("step", "{:.0f}"),
    "reward": ("reward/mean", "{:.3f}"),
    "no signal": ("reward/no_signal_groups", "{:.0%}"),
    "staleness": ("staleness/mean", "{:.2f}"),
    "tokens": ("completion/tokens_mean", "{:.1f}"),
    "gap": ("train/logprob_gap_mean", "{:.4f}"),
    "entropy": ("train/entropy", "{:.3f}"),
    "grad norm": ("train/grad_norm", "{:.3f}"),
    "train s": ("time/train_s", "{:.2f}"),
    "publish s": ("time/weight_update_s", "{:.2f}"),
}


def report(summary: dict[str, Any]) -> str:
    """Markdown: what ran where, the ledger, and one row a step."""
    steps = summary["steps"]
    rewards = [row["reward/mean"] for row in steps]
    lines = [
        f"# Run {summary['run_id']}",
        "",
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}. "
        f"{summary['state']}: {summary['version']} steps in {summary['uptime_s']:.0f} s, model loading included.",
        "",
        f"- reward, mean of the first 5 steps {fmean(rewards[:5]):.3f}, of the last 5 {fmean(rewards[-5:]):.3f}",
        f"- seconds of a step (median): train {median(row['time/train_s'] for row in steps):.2f}, "
        f"publish {median(row['time/weight_update_s'] for row in steps):.2f}",
        f"- weight updates: {summary['num_weight_updates']}; generation paused {median(s['pause_s'] for s in summary['syncs']):.2f} s "
        f"(median), {summary['syncs'][-1]['bytes'] / 1e6:.1f} MB each",
        f"- staleness of samples: {summary['staleness_counts']} (cap {summary['max_staleness']})",
        f"- verdicts: {summary['verdicts']}",
        f"- ledger: {summary['ledger']}",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "| " + " | ".join("---:" for _ in COLUMNS) + " |",
    ]
    for row in steps:
        cells = [form.format(row[key]) if key in row else "-" for key, form in COLUMNS.values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the report, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    text = report(json.loads((args.run / "summary.json").read_text()))
    if args.out:
        args.out.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
