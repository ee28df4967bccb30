"""Sharing small things between the ranks of the learner: texts, numbers and messages, as bytes, never as pickles."""

from __future__ import annotations

import msgpack
import torch
import torch.distributed as dist

from protocol.codec import Received, decode, encode


class World:
    """The torchrun world (or a single process, where every call is trivial). ``device`` is where collectives run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0

    def share_bytes(self, data: bytes) -> bytes:
        """Rank 0's ``data`` on every rank."""
        if self.size == 1:
            return data
        length = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        dist.broadcast(length, src=0)
        buffer = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        if self.rank == 0 and data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, src=0)
        return buffer.cpu().numpy().tobytes()

    def share_int(self, value: int) -> int:
        """Rank 0's number on every rank."""
        return int.from_bytes(self.share_bytes(value.to_bytes(8, "little", signed=True)), "little", signed=True)

    def share_message(self, received: Received | None, *, run_id: str) -> Received | None:
        """What rank 0 received, with its arrays, on every rank. None travels as itself."""
        if self.size == 1:
            return received
        frames = [] if received is None else encode(received.message, run_id=run_id, arrays=received.arrays)
        shared = msgpack.unpackb(
            self.share_bytes(msgpack.packb([bytes(frame) for frame in frames])), max_bin_len=1 << 31
        )
        return decode(shared) if shared else None

    def gather_text(self, text: str) -> list[str]:
        """The non-empty texts of all ranks, in order of rank, on every rank."""
        texts = [text]
        if self.size > 1:
            mine = text.encode()
            lengths = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(mine)], dtype=torch.int64, device=self._device))
            longest = max(1, *(int(length) for length in lengths))
            padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8).to(self._device)
            rows = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(rows, padded)
            texts = [
                row.cpu().numpy().tobytes()[: int(length)].decode() for row, length in zip(rows, lengths, strict=True)
            ]
        return [item for item in texts if item]

    def first_text(self, text: str) -> str:
        """The first non-empty text of any rank, or ''."""
        return next(iter(self.gather_text(text)), "")

    def close(self) -> None:
        """Leave torch's process group, if there is one."""
        if dist.is_initialized():
            dist.destroy_process_group()
