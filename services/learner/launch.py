"""Starts the ranks of a learner's world on this machine, waits for them, and ends with the exit code that says why the world ended.

    forebay learner --config FILE --ranks 2                                    a learner
    python -m services.learner.launch --ranks 2 -- PROGRAM ARGUMENT...         any program whose ranks call ``world.join``

A rank finds in its environment what torchrun would set, so torchrun and Slurm start the same ranks. torchrun, though, ends with 1 whatever
its ranks ended with, and gives them half a minute after a SIGTERM, in which a large model writes no checkpoint. No torch here: this process
only waits. It passes SIGINT and SIGTERM on, and the kernel kills the ranks if it is killed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from common.errors import ConfigError, ForebayError
from common.lifecycle import die_with_parent

log = structlog.get_logger()

FAILED_GRACE_S = 10.0  # for the others to end by themselves, and to say why, once a rank has failed
DONE_GRACE_S = 30.0  # likewise once one is done: they have nothing more to do together
STOPS = (signal.SIGINT, signal.SIGTERM)
STORE_FD = "FOREBAY_STORE_FD"  # rank 0 finds here the socket that its store listens on, another rank -1


@dataclass(frozen=True)
class Place:
    """Which ranks of a world run here: all ``ranks`` of them, or those of one of ``nodes`` machines with as many each.

    ``master`` is HOST:PORT of machine 0, where the ranks meet; with one machine they meet at a free port.
    """

    ranks: int = 1
    nodes: int = 1
    node_rank: int = 0
    master: str = ""

    @property
    def world_size(self) -> int:
        """Ranks on all machines."""
        return self.ranks * self.nodes

    def check(self) -> None:
        """
        Raises:
            ConfigError: no world could be started so.
        """
        host, _, port = self.master.rpartition(":")
        if self.ranks < 1 or not 0 <= self.node_rank < self.nodes:
            raise ConfigError(
                f"--ranks {self.ranks} --nodes {self.nodes} --node-rank {self.node_rank}: ranks and nodes count from 1, node ranks "
                "from 0 to nodes - 1."
            )
        if (self.nodes > 1) != bool(self.master) or (self.master and not (host and port.isdigit())):
            raise ConfigError(
                f"--nodes {self.nodes} --master {self.master or '(not given)'}: a world of several machines needs --master HOST:PORT, "
                "the same on each: a free port of the machine with --node-rank 0. One of a single machine finds its own."
            )
        if "RANK" in os.environ and self.world_size > 1:
            raise ConfigError(
                f"This process is rank {os.environ['RANK']} of a world already (RANK is set, as torchrun and srun do): leave --ranks out."
            )


def launch(argv: Sequence[str], place: Place) -> int:
    """Run ``argv`` once for each rank, and return the world's exit code when all have ended.

    Raises:
        ConfigError: ``place`` makes no sense, or its port is taken.
    """
    place.check()
    watched = {signal.SIGCHLD, *STOPS}
    # They are taken by ``sigtimedwait``, so none comes between.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    ranks = None
    try:
        ranks = _Ranks(argv, place, mask)
        while ranks.running:
            if (caught := signal.sigtimedwait(watched, ranks.patience_s())) and caught.si_signo in STOPS:
                ranks.signal(caught.si_signo)
            ranks.look()
        return ranks.exit_code()
    finally:
        if ranks is not None:
            ranks.signal(signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def exit_code_of(ends: Sequence[int]) -> int:
    """The exit code of a world whose ranks ended with ``ends``, in this order; negative is a signal, as in ``Popen.returncode``.

    It is that of the first rank with a reason of its own. 1 is none: such a rank has lost another (``RankLost``), or has said what
    happened in a trace, and there is no code for it.

    >>> [exit_code_of(ends) for ends in ([0, 0], [0, 143], [1, 7, 1], [-9, 1], [1, 1])]
    [0, 143, 7, 137, 1]
    """
    codes = [code if code >= 0 else 128 - code for code in ends]
    return next((code for code in codes if code > 1), max(codes, default=0))


class _Ranks:
    """The ranks of this machine, each in a session of its own: a terminal's Ctrl-C reaches only this process, which passes it on."""

    def __init__(self, argv: Sequence[str], place: Place, mask: set[signal.Signals]) -> None:
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        self.ends: list[tuple[int, int]] = []  # (rank, its return code), in the order in which they ended by themselves
        self._killed: list[int] = []
        self._deadline: float | None = None
        prepare = functools.partial(_in_child, os.getpid(), mask)
        address, store = _meeting_point(place)
        with store or contextlib.nullcontext():
            for local in range(place.ranks):
                rank = place.node_rank * place.ranks + local
                store_fd = store.fileno() if store and rank == 0 else -1
                self.running[rank] = subprocess.Popen(
                    argv,
                    env=_environment(place, rank, local, address) | {STORE_FD: str(store_fd)},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    pass_fds=[store_fd] if store_fd >= 0 else [],
                    preexec_fn=prepare,  # this process has no threads
                )

    def signal(self, signum: int) -> None:
        """To all that run. Of SIGINT and SIGTERM rank 0 makes an ordered stop, of which the others hear from it."""
        for process in self.running.values():
            process.send_signal(signum)

    def patience_s(self) -> float:
        """How long to wait for a signal before the next look. (Another thread, where there are any, may get SIGCHLD instead.)"""
        return 0.5 if self._deadline is None else min(0.5, max(0.0, self._deadline - time.monotonic()))

    def look(self) -> None:
        """Note who has ended, and kill who is left when the others' time is over."""
        for rank in [rank for rank, process in self.running.items() if process.poll() is not None]:
            code = self.running.pop(rank).returncode
            self.ends.append((rank, code))
            log.info("rank_ended", rank=rank, exit_code=code)
            until = time.monotonic() + (FAILED_GRACE_S if code else DONE_GRACE_S)
            self._deadline = until if self._deadline is None else min(self._deadline, until)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            for rank, process in self.running.items():
                log.warning("rank_killed", rank=rank, reason="it did not end after another rank had")
                process.kill()
                process.wait()
            self._killed += self.running
            self.running.clear()

    def exit_code(self) -> int:
        """The world's. Says why, if it is a rank that could not do so itself."""
        code = exit_code_of([code for _, code in self.ends])
        for rank, end in self.ends:
            if end < 0 and 128 - end == code and -end not in STOPS:
                print(
                    f"error: Rank {rank} of the learner was killed by {signal.Signals(-end).name}. Nobody but a person, a service manager "
                    "or the kernel (out of memory: see dmesg) does that; start the learner again, it goes on from its checkpoint.",
                    file=sys.stderr,
                    flush=True,
                )
                break
        return code or int(bool(self._killed))


def _in_child(parent: int, mask: set[signal.Signals]) -> None:
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _meeting_point(place: Place) -> tuple[tuple[str, str], socket.socket | None]:
    """Where the ranks meet, and the socket that listens there, if that is here. Nobody can take its port before rank 0 uses it."""
    host, _, port = place.master.rpartition(":")
    if place.node_rank:
        return (host, port), None
    try:
        store = socket.create_server(("" if host else "127.0.0.1", int(port or 0)), backlog=4096)
    except OSError as error:
        raise ConfigError(
            f"The ranks can't meet at {place.master}: {error.strerror}. Give --master a free port of this machine."
        ) from None
    return (host or "127.0.0.1", str(store.getsockname()[1])), store


def _environment(place: Place, rank: int, local: int, address: tuple[str, str]) -> dict[str, str]:
    ours = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": place.world_size,
        "LOCAL_WORLD_SIZE": place.ranks,
        "MASTER_ADDR": address[0],
        "MASTER_PORT": address[1],
    }
    threads = {"OMP_NUM_THREADS": "1"} if place.ranks > 1 else {}  # as torchrun: the ranks share the cores
    return threads | os.environ | {key: str(value) for key, value in ours.items()}


def main() -> int:
    """Body of ``python -m services.learner.launch``."""
    parser = argparse.ArgumentParser(prog="python -m services.learner.launch")
    parser.add_argument("--ranks", type=int, required=True, metavar="N", help="ranks on this machine")
    parser.add_argument("program", nargs="+", help="what each rank runs")
    args = parser.parse_args()
    try:
        return launch(args.program, Place(args.ranks))
    except ForebayError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
