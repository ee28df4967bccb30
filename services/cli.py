"""The ``forebay`` command: parses, loads the config, then imports one role or tool. Nothing heavy is imported before that."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.config import Config

ROLES = ("coordinator", "rollout", "reward", "learner")


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="forebay", description="Asynchronous GRPO training of code-writing language models."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="run all roles on this machine, with live progress")
    up.add_argument("config", nargs="?", type=Path, help="a TOML file, such as deploy/configs/quickstart.toml")
    up.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder")
    _add_set(up)

    for role in ROLES:
        one = commands.add_parser(
            role, help=f"run one {role}" + (" (also under torchrun)" if role == "learner" else "")
        )
        one.add_argument("--config", type=Path, required=True)
        one.add_argument("--node-id", default="", help="name in logs and status; must be unique in the run")
        _add_set(one)

    check = commands.add_parser("check", help="say all that is wrong with a config, before anything starts")
    check.add_argument("config", type=Path)
    _add_set(check)

    for name, text in (
        ("status", "nodes, versions, leases, buffer and ledger of a run"),
        ("stop", "end a run in order"),
    ):
        tool = commands.add_parser(name, help=text)
        where = tool.add_mutually_exclusive_group(required=True)
        where.add_argument("--config", type=Path, help="the run's config, for its address")
        where.add_argument("--address", help="the coordinator's address, tcp://HOST:PORT")
        _add_set(tool)
        if name == "status":
            tool.add_argument("--json", action="store_true", help="everything, for programs")

    evaluate = commands.add_parser("eval", help="solve rate of Hugging Face checkpoints on a task file")
    evaluate.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    evaluate.add_argument("--tasks", type=Path, required=True)
    evaluate.add_argument("--config", type=Path, required=True, help="for lengths, engine and sandbox settings")
    evaluate.add_argument("--samples", type=int, default=8, help="completions for each task (default 8)")
    _add_set(evaluate)

    data = commands.add_parser("data", help="task files").add_subparsers(dest="data_command", required=True)
    convert = data.add_parser("convert", help="HumanEval or MBPP in HumanEval's form (JSONL, also .gz) -> a task file")
    convert.add_argument("source", type=Path)
    convert.add_argument("target", type=Path)
    return top


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a config key, e.g. run.seed=7",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Expected errors are printed as their paragraph."""
    args = parser().parse_args(argv)
    from common.errors import ForebayError

    try:
        return _COMMANDS[args.command](args)
    except ForebayError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _load(args: argparse.Namespace, *, consistent: bool = False) -> Config:
    from services.config import load_config, require_consistent

    config = load_config(args.config, args.overrides)
    if consistent:
        require_consistent(config, str(args.config))
    return config


def _role(args: argparse.Namespace) -> int:
    config = _load(args)
    import common.logs

    log = common.logs.setup(args.command, level=config.run.log_level, run=config.run.id)
    log.info("starting", version="0.1.0")
    if args.command == "learner":
        from services.learner.service import main as learner_main

        return learner_main(config.run, config.learner, node_id=args.node_id)
    from common.lifecycle import run_main

    if args.command == "coordinator":
        from services.coordinator.service import main as coordinator_main

        return run_main(lambda: coordinator_main(config.run, config.coordinator))
    if args.command == "rollout":
        from services.rollout.service import main as rollout_main

        return run_main(lambda: rollout_main(config.run, config.rollout, node_id=args.node_id))
    from services.reward.service import main as reward_main

    return run_main(lambda: reward_main(config.run, config.reward, node_id=args.node_id))


def _up(args: argparse.Namespace) -> int:
    from services import up

    return up.main(args.config, args.resume, args.overrides)


def _check(args: argparse.Namespace) -> int:
    config = _load(args, consistent=True)
    print(f"{args.config}: run {config.run.id!r} is consistent.")
    return 0


def _address(args: argparse.Namespace) -> tuple[str, str]:
    if args.address:
        return args.address, ""
    config = _load(args)
    return config.run.address, ""


def _status(args: argparse.Namespace) -> int:
    from services import view

    return view.main(*_address(args), as_json=args.json)


def _stop(args: argparse.Namespace) -> int:
    from protocol.client import ask
    from protocol.messages import StopRequest

    address, run_id = _address(args)
    ask(address, run_id, StopRequest(reason="forebay stop"), timeout_s=10.0)
    print(f"The run at {address} is stopping; go on with: forebay up --resume RUN_FOLDER")
    return 0


def _eval(args: argparse.Namespace) -> int:
    config = _load(args)
    from services import evaluate

    return evaluate.main(config, args.models, args.tasks, num_samples=args.samples)


def _data(args: argparse.Namespace) -> int:
    from services import data

    return data.convert(args.source, args.target)


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "up": _up,
    "check": _check,
    "status": _status,
    "stop": _stop,
    "eval": _eval,
    "data": _data,
    **dict.fromkeys(ROLES, _role),
}

if __name__ == "__main__":
    sys.exit(main())
