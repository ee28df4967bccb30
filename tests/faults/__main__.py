"""``make faults``: every kind of fault, injected into real processes on this machine, and what the system makes of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError, ForebayError
from tests.faults import soak, suite


def parser() -> argparse.ArgumentParser:
    """The options."""
    top = argparse.ArgumentParser(prog="make faults ARGS=...", description=__doc__)
    top.add_argument("--list", action="store_true", help="the cases, as a table")
    top.add_argument("--case", action="append", default=[], metavar="NAME", help="only this one; may be repeated")
    top.add_argument("--stage", action="append", default=[], metavar="S", help="only this stage of the loop; likewise")
    top.add_argument("--real", action="store_true", help="also the cases with real vLLM and Megatron")
    top.add_argument("--json", type=Path, metavar="FILE", help="the results, for programs")
    top.add_argument("--keep", type=Path, metavar="DIR", help="keep all logs and journals there")
    top.add_argument("--seed", type=int, default=0, help="of what chance decides")
    one_run = top.add_mutually_exclusive_group()
    one_run.add_argument("--soak", type=float, metavar="SECONDS", help="instead: random kills in one long run")
    one_run.add_argument("--kills", type=int, metavar="N", help="instead: so many random kills")
    return top


def run(args: argparse.Namespace) -> int:
    """The exit code.

    Raises:
        ConfigError: options that exclude each other.
    """
    is_soak = args.soak is not None or args.kills is not None
    if is_soak and (args.case or args.stage or args.real or args.json or args.list):
        raise ConfigError(
            "--soak and --kills are one run of their own: without --case, --stage, --real, --json, --list."
        )
    if (args.soak or args.kills or 0) <= 0 and is_soak:
        raise ConfigError("--soak takes a number of seconds, --kills a number of kills: more than 0.")
    if args.case and args.stage:
        raise ConfigError("--case names cases of any stage: leave out --stage.")
    if args.list:
        print(suite.list_table(suite.select(args.case, args.stage, real=True)), end="")
        return 0
    if is_soak:
        return soak.main(kills=args.kills, seconds=args.soak, seed=args.seed, keep=args.keep)
    return suite.main(
        names=args.case, stages=args.stage, real=args.real, seed=args.seed, json_path=args.json, keep=args.keep
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Expected errors are printed as their paragraph."""
    try:
        return run(parser().parse_args(argv))
    except ForebayError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
