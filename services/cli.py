"""The ``forebay`` command: parses, loads the config, then imports one role or tool. Nothing heavy is imported before that."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from protocol.security import Keys
    from services.config import Config

ROLES = {
    "coordinator": "run the coordinator of a run",
    "rollout": "run one rollout node",
    "reward": "run one reward node; --once: judge a file, without a run",
    "learner": "run the learner, or this machine's ranks of it",
}


def parser() -> argparse.ArgumentParser:
    """The whole command line. Long, because it is a list: one command after the other."""
    top = argparse.ArgumentParser(
        prog="forebay", description="Asynchronous GRPO training of code-writing language models."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="run all roles on this machine, with live progress")
    up.add_argument("config", nargs="?", type=Path, help="a TOML file, such as deploy/configs/quickstart.toml")
    up.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder")
    _add_set(up)

    for role, text in ROLES.items():
        one = commands.add_parser(role, help=text)
        one.add_argument("--config", type=Path, required=role != "reward")
        one.add_argument("--node-id", default="", help="name in logs and status; must be unique in the run")
        if role == "reward":
            one.add_argument(
                "--once", metavar="IN", help="without a run: judge the lines of this JSONL file (-: stdin)"
            )
            one.add_argument("--out", metavar="OUT", help="with --once: where the verdicts go (-: stdout)")
        if role == "learner":
            one.add_argument(
                "--ranks", type=int, default=1, metavar="N", help="ranks on this machine, one a GPU (default 1)"
            )
            one.add_argument("--nodes", type=int, default=1, metavar="N", help="machines with as many each (default 1)")
            one.add_argument("--node-rank", type=int, default=0, metavar="K", help="which of them this is, from 0")
            one.add_argument("--master", default="", metavar="HOST:PORT", help="of machine 0, where the ranks meet")
        _add_set(one)

    judge = commands.add_parser("judge", help="judge one completion here, and explain the verdict")
    judge.add_argument(
        "file", metavar="FILE", help="a completion, or a program (.py, .cpp, .js); -: a completion on stdin"
    )
    judge.add_argument(
        "--tests", type=Path, required=True, metavar="T", help="a suite, a task line, or with --task-id a task file"
    )
    judge.add_argument("--task-id", default="", metavar="ID", help="which line of T")
    judge.add_argument("--code", action="store_true", help="print all of the code that was judged")
    judge.add_argument("--json", action="store_true", help="everything, for programs")
    judge.add_argument("--config", type=Path, help="a config with a [reward] section (default: its defaults)")
    _add_set(judge)

    check = commands.add_parser("check", help="say all that is wrong with a config, before anything starts")
    check.add_argument("config", type=Path)
    _add_set(check)

    for name, text in (
        ("status", "nodes, versions, leases, buffer and ledger of a run"),
        ("waits", "who waits on whom, since when and until when, and circles"),
        ("stop", "end a run in order"),
    ):
        tool = commands.add_parser(name, help=text)
        where = tool.add_mutually_exclusive_group(required=True)
        where.add_argument("--config", type=Path, help="the run's config, for its address")
        where.add_argument("--address", help="the coordinator's address, tcp://HOST:PORT")
        tool.add_argument("--key-file", type=Path, help="with --address: the run's keys, if it has some")
        _add_set(tool)
        if name in ("status", "waits"):
            tool.add_argument("--json", action="store_true", help="everything, for programs")
        if name == "waits":
            tool.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")

    postmortem = commands.add_parser(
        "postmortem", help="one archive of what is known of a run that failed: waits, stacks, logs, queue, ledger"
    )
    postmortem.add_argument("run", type=Path, metavar="RUN", help="the run's folder; the run may be alive")
    postmortem.add_argument(
        "--out", type=Path, metavar="FILE.tar.gz", help="default: RUN-postmortem-DATE.tar.gz in this folder"
    )

    keys = commands.add_parser(
        "keys", help="make the key file of a run, which encrypts and authenticates its connections"
    )
    keys.add_argument("file", type=Path)

    export = commands.add_parser(
        "export", help="a checkpoint of any parallel layout -> a Hugging Face folder, on the CPU"
    )
    export.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="its folder, or a run's: the latest one")
    export.add_argument("target", type=Path, metavar="DIR", help="the folder to make")
    export.add_argument("--model", type=Path, help="the Hugging Face folder that the run began with, if it has moved")

    evaluate = commands.add_parser("eval", help="solve rate of Hugging Face checkpoints on a task file")
    evaluate.add_argument("models", nargs="+", type=Path, metavar="MODEL")
    evaluate.add_argument("--tasks", type=Path, required=True)
    evaluate.add_argument("--config", type=Path, required=True, help="for lengths, engine and sandbox settings")
    evaluate.add_argument("--samples", type=int, default=8, help="completions for each task (default 8)")
    _add_set(evaluate)

    data = commands.add_parser("data", help="task files").add_subparsers(dest="data_command", required=True)
    convert = data.add_parser(
        "convert", help="HumanEval, MBPP in HumanEval's form, or APPS's form (JSONL, also .gz) -> a task file"
    )
    convert.add_argument("source", type=Path)
    convert.add_argument("target", type=Path)
    verify = data.add_parser(
        "check", help="judge each task's own solution, and name the tasks whose suite does not accept it"
    )
    verify.add_argument("tasks", type=Path)
    verify.add_argument("--repeat", type=int, default=3, metavar="N", help="times each solution is judged (default 3)")
    verify.add_argument("--config", type=Path, help="for its [reward] section")
    _add_set(verify)
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
    except (
        OSError
    ) as error:  # of the files and folders that the user named; ours are within a role, which has its own words
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}.", file=sys.stderr, flush=True)
        return ForebayError.exit_code
    except KeyboardInterrupt:
        return 130


def _load(args: argparse.Namespace, *, consistent: bool = False) -> Config:
    from services.config import load_config, require_consistent

    config = load_config(args.config, args.overrides)
    if consistent:
        require_consistent(config, str(args.config))
    return config


def _judge(args: argparse.Namespace) -> int:
    from services.config import load_reward_config

    config = load_reward_config(args.config, args.overrides)
    import common.logs
    from services.tools import judge

    common.logs.setup("reward", level="warning")
    return judge.main(config, args.file, args.tests, task_id=args.task_id, show_code=args.code, as_json=args.json)


def _reward_once(args: argparse.Namespace) -> int:
    from common.errors import ConfigError
    from services.config import load_reward_config

    if args.once is None or args.out is None:
        given, missing = ("--out", "--once IN.jsonl") if args.once is None else ("--once", "--out OUT.jsonl")
        raise ConfigError(f"{given} needs {missing}.")
    config = load_reward_config(args.config, args.overrides)
    import common.logs
    from services.tools import judge_file

    common.logs.setup("reward", level="warning")
    return judge_file.main(config, args.once, args.out)


def _role(args: argparse.Namespace) -> int:
    if args.command == "reward":
        if args.once is not None or args.out is not None:
            return _reward_once(args)
        if args.config is None:
            from common.errors import ConfigError

            raise ConfigError(
                "A reward node needs --config FILE, for the run that it joins; without a run: --once IN --out OUT."
            )
    config = _load(args)
    import common.logs
    from common.recorder import RECORDER

    log = common.logs.setup(args.command, level=config.run.log_level, run=config.run.id)
    log.info("starting", version="0.1.0")
    RECORDER.describe(
        args.command, run_dir=config.run.run_dir, config=config.model_dump(mode="json"), node_id=args.node_id
    )
    if args.command == "learner":
        from services.learner import launch

        place = launch.Place(args.ranks, args.nodes, args.node_rank, args.master)
        if place != launch.Place():
            return launch.launch(_rank_argv(args), place)
        from services.learner.service import main as learner_main

        learner_main(config.run, config.learner, node_id=args.node_id)
    from common.lifecycle import run_main

    if args.command == "coordinator":
        from services.coordinator.service import main as coordinator_main

        resolved = config.model_dump_json(indent=1)
        return run_main(lambda: coordinator_main(config.run, config.coordinator, resolved=resolved))
    if args.command == "rollout":
        from services.rollout.service import main as rollout_main

        return run_main(lambda: rollout_main(config.run, config.rollout, node_id=args.node_id), native_threads=True)
    from services.reward.service import main as reward_main

    return run_main(lambda: reward_main(config.run, config.reward, node_id=args.node_id))


def _rank_argv(args: argparse.Namespace) -> list[str]:
    """The same learner as one rank of a world."""
    sets = [word for override in args.overrides for word in ("--set", override)]
    return [sys.executable, "-m", "services.learner", "--config", str(args.config), "--node-id", args.node_id, *sets]


def _up(args: argparse.Namespace) -> int:
    from services.tools import up

    return up.main(args.config, args.resume, args.overrides)


def _check(args: argparse.Namespace) -> int:
    config = _load(args, consistent=True)
    print(f"{args.config}: run {config.run.id!r} is consistent.")
    return 0


def _where(args: argparse.Namespace) -> tuple[str, Keys | None]:
    """Address and keys of the run that a tool is asked about."""
    from common.errors import ConfigError
    from protocol.config import check_address
    from protocol.security import read_keys

    if args.address:
        if args.overrides:
            raise ConfigError("--set changes a config: it needs --config, not --address.")
        try:
            return check_address(args.address), read_keys(args.key_file) if args.key_file else None
        except ValueError as error:
            raise ConfigError(f"--address {args.address} {error}.") from None
    if args.key_file:
        raise ConfigError("--key-file goes with --address; a config names its own (run.key_file).")
    run = _load(args).run
    return run.address, run.read_keys()


def _status(args: argparse.Namespace) -> int:
    from services.tools import status

    address, keys = _where(args)
    return status.main(address, keys=keys, as_json=args.json)


def _waits(args: argparse.Namespace) -> int:
    from services.tools import waits

    address, keys = _where(args)
    return waits.main(address, keys=keys, as_json=args.json, watch=args.watch)


def _postmortem(args: argparse.Namespace) -> int:
    from services.tools import postmortem

    return postmortem.main(args.run, args.out)


def _stop(args: argparse.Namespace) -> int:
    from protocol.client import ask
    from protocol.messages import StopRequest

    address, keys = _where(args)
    ask(address, "", StopRequest(reason="forebay stop"), timeout_s=10.0, keys=keys)
    print(f"The run at {address} is stopping; go on with: forebay up --resume RUN_FOLDER")
    return 0


def _keys(args: argparse.Namespace) -> int:
    from protocol.security import write_keys

    write_keys(args.file)
    print(
        f"Keys of a run in {args.file}. Copy it to every machine of the run, for its user's eyes only, and set run.key_file to it."
    )
    return 0


def _eval(args: argparse.Namespace) -> int:
    config = _load(args)
    from services.tools import eval

    return eval.main(config, args.models, args.tasks, num_samples=args.samples)


def _export(args: argparse.Namespace) -> int:
    from services.tools import export

    return export.main(args.checkpoint, args.target, model=args.model)


def _data(args: argparse.Namespace) -> int:
    from services.tools import data

    if args.data_command == "convert":
        return data.convert(args.source, args.target)
    from services.config import load_reward_config

    config = load_reward_config(args.config, args.overrides)
    import common.logs

    common.logs.setup("reward", level="warning")
    return data.check(config, args.tasks, repeat=args.repeat)


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "up": _up,
    "judge": _judge,
    "check": _check,
    "status": _status,
    "waits": _waits,
    "postmortem": _postmortem,
    "stop": _stop,
    "keys": _keys,
    "eval": _eval,
    "export": _export,
    "data": _data,
    **dict.fromkeys(ROLES, _role),
}

if __name__ == "__main__":
    sys.exit(main())
