"""The ranks of the learner among themselves: how they meet, share small things, and say why an operation between them failed.

Texts, numbers and messages are shared as bytes, never as pickles; each is a named wait of this rank for the others. What torch and
Megatron do between ranks (a training step, a checkpoint) is bounded by the same limit, which is that of their process groups; for whom
a rank waits there is known from the ranks' signs (``signs.py``).
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NoReturn

import msgpack
import structlog
import torch
import torch.distributed as dist

from common.errors import ForebayError, RankLost, WaitTimeout
from common.lifecycle import leave, say
from common.recorder import RECORDER
from common.waits import Wait, WaitTable, expired
from protocol.codec import Received, decode, encode
from protocol.weights import connect_store, serve_store
from services.learner.launch import STORE_FD
from services.learner.signs import LIMIT_KEY, Progress, Signs

log = structlog.get_logger()

END_GRACE_S = 3.0  # for the training thread to end by itself, once another rank has ended
NCCL_GRACE_S = 60.0  # its own watch aborts the process without a word: ours comes first


def group_timeout_s(backend: str, timeout_s: float) -> float:
    """Of a process group in which no rank may wait longer than ``timeout_s``."""
    return timeout_s + (NCCL_GRACE_S if backend == "nccl" else 0.0)


def meet(*, timeout_s: float) -> dist.Store:
    """The store where the ranks meet that ``launch``, torchrun or Slurm started; rank 0, or torchrun, serves it.

    Raises:
        RuntimeError: of torch; rank 0 is not there within ``timeout_s``.
    """
    timeout = timedelta(seconds=timeout_s)
    if STORE_FD not in os.environ:
        store: dist.Store = next(iter(dist.rendezvous("env://", timeout=timeout)))[0]
        return store
    rank, store_fd = int(os.environ["RANK"]), int(os.environ[STORE_FD])
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=rank == 0,
        timeout=timeout,
        master_listen_fd=store_fd if rank == 0 else None,
    )


def join(backend: str, *, timeout_s: float) -> None:
    """Joins torch's process group of the ranks that were started together; a process that is no rank makes a group of its own.

    Raises:
        WaitTimeout: the others did not come within ``timeout_s``.
    """
    timeout = timedelta(seconds=group_timeout_s(backend, timeout_s))
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    rank, size, started = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), time.monotonic()
    try:
        store = dist.PrefixStore("ranks", meet(timeout_s=timeout_s))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        if _kind(error) != "timeout":
            raise
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise WaitTimeout(
            f"Rank {rank} of the learner waited {time.monotonic() - started:.0f} s at {where} for the other {size - 1}, and they did not "
            f"all come. The limit is {LIMIT_KEY} in the config. Is every machine's part of the world started, and the address reached from it?"
        ) from error


class World:
    """The ranks of the learner (or a single process, where every call is trivial). ``device`` is where collectives run.

    All methods raise ``WaitTimeout`` when a rank does not come within ``timeout_s``, which is the process group's own limit, and
    ``RankLost`` when one is gone. ``what`` names what is shared, for whoever wonders why a rank waits.
    """

    def __init__(
        self, device: torch.device, *, waits: WaitTable, timeout_s: float, progress: Progress | None = None
    ) -> None:
        self.waits, self.timeout_s, self.progress = waits, timeout_s, progress or Progress()
        self._device = device
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._signs: Signs | None = None
        self._leaving = threading.Event()
        if self.size > 1:
            self._signs = self._give_signs()

    def _give_signs(self) -> Signs:
        store, port = None, ""
        if self.rank == 0:
            store, address = serve_store(os.environ["MASTER_ADDR"], timeout_s=self.timeout_s)
            port = address.rpartition(":")[2]
        port = self.share_bytes(port.encode(), "where signs of life are left").decode()
        store = store or connect_store(f"{os.environ['MASTER_ADDR']}:{port}", timeout_s=self.timeout_s)
        signs = Signs(
            store,
            self.progress,
            self.waits,
            rank=self.rank,
            size=self.size,
            timeout_s=self.timeout_s,
            lose=self._lose,
        )
        self.gather_text("", "the first sign of every rank")
        signs.start()
        return signs

    def share_bytes(self, data: bytes, what: str) -> bytes:
        """Rank 0's ``data`` on every rank."""
        if self.size == 1:
            return data
        with self._wait(what):
            length = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
            dist.broadcast(length, src=0)
            buffer = torch.empty(int(length), dtype=torch.uint8, device=self._device)
            if self.rank == 0 and data:
                buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            dist.broadcast(buffer, src=0)
            return buffer.cpu().numpy().tobytes()

    def share_int(self, value: int, what: str) -> int:
        """Rank 0's number on every rank."""
        return int.from_bytes(self.share_bytes(value.to_bytes(8, "little", signed=True), what), "little", signed=True)

    def share_message(self, received: Received | None, what: str, *, run_id: str) -> Received | None:
        """What rank 0 received, with its arrays, on every rank. None travels as itself."""
        if self.size == 1:
            return received
        frames = [] if received is None else encode(received.message, run_id=run_id, arrays=received.arrays)
        shared = msgpack.unpackb(
            self.share_bytes(msgpack.packb([bytes(frame) for frame in frames]), what), max_bin_len=1 << 31
        )
        return decode(shared) if shared else None

    def gather_text(self, text: str, what: str) -> list[str]:
        """The non-empty texts of all ranks, in order of rank, on every rank."""
        texts = [text]
        if self.size > 1:
            with self._wait(what):
                texts = self._gather(text.encode())
        return [item for item in texts if item]

    def _gather(self, mine: bytes) -> list[str]:
        lengths = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(mine)], dtype=torch.int64, device=self._device))
        longest = max(1, *(int(length) for length in lengths))
        padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8).to(self._device)
        rows = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(rows, padded)
        return [row.cpu().numpy().tobytes()[: int(length)].decode() for row, length in zip(rows, lengths, strict=True)]

    def first_text(self, text: str) -> str:
        """The first non-empty text of any rank, or ''."""
        return next(iter(self.gather_text(text, "how the update went on every rank")), "")

    @contextmanager
    def _wait(self, what: str) -> Iterator[None]:
        self.progress.phase(what)
        others = "rank 0" if self.rank else "rank 1" if self.size == 2 else f"ranks 1-{self.size - 1}"
        with self.waits.named(what, on=others, timeout_s=self.timeout_s, limit_key=LIMIT_KEY) as wait:
            try:
                yield
            except RuntimeError as error:  # torch.distributed raises its subclasses for timeouts and lost peers
                raise self._in_words(error, wait) from error

    def explain(self, error: Exception) -> Exception:
        """What an error of torch between the ranks means, as ``WaitTimeout`` or ``RankLost``. Any other error is returned as it is."""
        if self.size == 1 or isinstance(error, ForebayError) or not _kind(error):
            return error
        _, phase, part, since = self.progress.now
        what = f"{phase}, {part}" if part else phase
        told = self._in_words(error, Wait(what, "another rank", since, math.inf, LIMIT_KEY))
        told.__cause__ = error
        return told

    def _in_words(self, error: Exception, wait: Wait) -> ForebayError:
        word = self._signs.word if self._signs else None
        on = word.on if word and word.on else wait.on
        # gloo may count from an earlier message that the rank did not take
        if time.monotonic() >= wait.deadline or _kind(error) == "timeout":
            late = expired(Wait(wait.what, on, wait.since, wait.deadline, wait.limit_key))
            return WaitTimeout(f"{late} By the signs of life: {word.text}." if word and word.text else str(late))
        return RankLost(
            f"Rank {self.rank} of the learner lost another in {wait.what}: {str(error).partition('. This is')[0]}. The log and report of the "
            "rank that ended first say why; start the learner again, it goes on from its checkpoint."
        )

    def _lose(self, failed: str) -> None:
        """In the thread of the signs: another rank has failed. The training thread may sit where nothing tells it."""
        if not self._leaving.wait(END_GRACE_S):
            _end(RankLost(f"Rank {self.rank} of the learner ends because another has ended. {failed}"))

    def tell_failed(self, error: Exception) -> None:
        """The others hear that this rank ends with ``error``, unless it ends because of one of them."""
        self._leaving.set()
        if self._signs is not None:
            self._signs.close()
            if not isinstance(error, RankLost):
                self._signs.tell_failed(error)

    def close(self) -> None:
        """Leave torch's process group, if there is one, when nothing is left to be done together."""
        self._leaving.set()
        if self._signs is not None:
            self._signs.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def fail(error: Exception, world: World | None) -> NoReturn:
    """Ends this rank with ``error``, in words; ``world`` is None while there is none yet."""
    if world is not None:
        error = world.explain(error)
        world.tell_failed(error)
    _end(error)


def _end(error: Exception) -> NoReturn:
    RECORDER.write(error)
    if isinstance(error, RankLost):  # not the last words of the world: those are another rank's
        log.warning("rank_lost", reason=str(error))
        leave(error.exit_code)
    leave(say(error))


def is_between_ranks(error: BaseException) -> bool:
    """Whether torch says that another rank did not come, or is gone."""
    return bool(_kind(error))


def _kind(error: BaseException) -> str:
    """``timeout`` or ``lost`` for an error of torch between ranks, '' for any other. gloo's are plain ``RuntimeError``s."""
    text = str(error)
    if not (isinstance(error, dist.DistError) or "/gloo/" in text or "NCCL" in text):
        return ""
    return "timeout" if "timeout" in text.lower() or "timed out" in text.lower() else "lost"
