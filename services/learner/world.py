"""Sharing small things between the ranks of the learner: texts, numbers and messages, as bytes, never as pickles.

Each is a named wait of this rank for the others. What torch itself does between ranks (a training step, a checkpoint) is bounded by
the same limit, which is that of its process group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgpack
import torch
import torch.distributed as dist

from common.errors import PeerError
from common.waits import WaitTable, expired
from protocol.codec import Received, decode, encode

LIMIT_KEY = "learner.wait_timeout_s"


class World:
    """The torchrun world (or a single process, where every call is trivial). ``device`` is where collectives run.

    All methods raise ``WaitTimeout`` when a rank does not come within ``timeout_s``, which is the process group's own limit, and
    ``PeerError`` when one is gone. ``what`` names what is shared, for whoever wonders why a rank waits.
    """

    def __init__(self, device: torch.device, *, waits: WaitTable, timeout_s: float) -> None:
        self.waits, self.timeout_s = waits, timeout_s
        self._device = device
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0

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
        others = "rank 0" if self.rank else "rank 1" if self.size == 2 else f"ranks 1-{self.size - 1}"
        with self.waits.named(what, on=others, timeout_s=self.timeout_s, limit_key=LIMIT_KEY) as wait:
            try:
                yield
            except RuntimeError as error:  # torch.distributed raises its subclasses for timeouts and lost peers
                if (
                    time.monotonic() >= wait.deadline
                    or "timeout" in str(error).lower()
                    or "timed out" in str(error).lower()
                ):
                    raise expired(wait) from error  # gloo may count from an earlier message that the rank did not take
                raise PeerError(
                    f"Rank {self.rank} of the learner lost {others} while it waited for {what}: {error}. The log and report of the "
                    "rank that ended first say why; start the learner again, it goes on from its checkpoint."
                ) from error

    def close(self) -> None:
        """Leave torch's process group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()
