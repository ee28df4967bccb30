"""What a coordinator needs before it can serve. Everything that can be wrong with it is found here, and before anything is changed."""

from __future__ import annotations

from pathlib import Path

from common.errors import ConfigError
from common.net import listens_on_loopback
from protocol.config import RunConfig
from protocol.router import CoordinatorSocket
from protocol.tasks import Task, fingerprint, load_tasks
from services.coordinator.config import CoordinatorConfig
from services.coordinator.journal import Journal


def unprotected(run: RunConfig, config: CoordinatorConfig) -> str:
    """What is wrong with listening without keys, and what to do; '' if nothing is."""
    bind = config.bind or run.address
    if run.key_file is not None or listens_on_loopback(bind) or config.insecure:
        return ""
    return (
        f"coordinator.bind {bind} can be reached from other machines, and nothing is encrypted or authenticated. Make keys "
        "(forebay keys FILE) and name them in run.key_file on every machine, listen on a loopback address, or say "
        "coordinator.insecure = true if the network is yours alone."
    )


def open_parts(run: RunConfig, config: CoordinatorConfig) -> tuple[list[Task], CoordinatorSocket, Journal]:
    """The tasks, the bound socket and the open journal of a run.

    Raises:
        ConfigError: tasks, address or journal can't be used; nothing is left open.
    """
    if open_to_all := unprotected(run, config):
        raise ConfigError(open_to_all)
    bind, keys = config.bind or run.address, run.read_keys()
    tasks = load_tasks(config.tasks)
    socket = CoordinatorSocket(bind, run.id, keys=keys)
    fixed = {
        "run.seed": run.seed,
        "run.routing_replay": run.routing_replay,
        **{
            f"coordinator.{key}": getattr(config, key)
            for key in ("group_size", "groups_per_step", "shuffle", "max_epochs")
        },
        "coordinator.tasks (their content)": fingerprint(tasks),
    }
    try:
        path = Path(run.run_dir) / "journal.sqlite"
        return tasks, socket, Journal(path, run_id=run.id, fixed=fixed, disk_timeout_s=config.disk_timeout_s)
    except ConfigError:
        socket.close()
        raise
