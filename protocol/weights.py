"""The data plane of a weight update: tensors under their Hugging Face names, in flat buckets, over one broadcast group.

The plan is made on CPU from names, dtypes and shapes alone. On the wire, for each sender (pipeline stage), rank 0 broadcasts:

    1. int64 [1]        length of the manifest
    2. uint8 [length]   manifest: msgpack of the buckets' tensors
    3. uint8 [n]        each bucket's bytes, in order
    4. int64 [buckets]  CRC-32 of each bucket, which the receiver compares before it uses anything

``torch`` is imported only inside the functions that move bytes: importing this module loads no torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import msgpack

from common.errors import ProtocolError

if TYPE_CHECKING:
    import torch

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor: Hugging Face name, torch dtype name, full shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size on the wire."""
        count = 1
        for size in self.shape:
            count *= size
        return count * DTYPE_BYTES[self.dtype]


def plan_buckets(specs: Sequence[TensorSpec], bucket_bytes: int) -> list[list[TensorSpec]]:
    """Consecutive tensors in buckets of at most ``bucket_bytes``; a larger tensor gets a bucket of its own. Order is kept."""
    buckets: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        if not buckets or spec.num_bytes > room:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(spec)
        room -= spec.num_bytes
    return buckets


def encode_manifest(buckets: Sequence[Sequence[TensorSpec]]) -> bytes:
    """Buckets as bytes."""
    return bytes(msgpack.packb([[(spec.name, spec.dtype, spec.shape) for spec in bucket] for bucket in buckets]))


def decode_manifest(data: bytes) -> list[list[TensorSpec]]:
    """The buckets in ``data``.

    Raises:
        ProtocolError: not a manifest, or a dtype that doesn't travel.
    """
    try:
        raw = msgpack.unpackb(data)
        buckets = [[TensorSpec(str(n), str(d), tuple(int(x) for x in s)) for n, d, s in bucket] for bucket in raw]
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"The weight manifest is malformed: {error}.") from None
    for spec in (spec for bucket in buckets for spec in bucket):
        if spec.dtype not in DTYPE_BYTES:
            raise ProtocolError(
                f"The weight manifest has {spec.name} as {spec.dtype}; only {sorted(DTYPE_BYTES)} travel."
            )
    return buckets


class BroadcastGroup:
    """One sender's process group, outside torch's default one: rank 0 sends, the others receive.

    NCCL on CUDA tensors, gloo on CPU tensors. ``close`` also interrupts peers that sit in a broadcast with this process.
    """

    def __init__(self, store: Any, *, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
        """Rendezvous with the other ranks through ``store``, within ``timeout_s``."""
        import torch.distributed as dist

        timeout = timedelta(seconds=timeout_s)
        self.device = device
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, world_size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, world_size, timeout)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fill ``tensor`` on all ranks with rank 0's; returns when it is usable."""
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()

    def close(self) -> None:
        """Leave the group and close its connections."""
        self._group.shutdown() if hasattr(self._group, "shutdown") else None
        del self._group


def connect_store(address: str, *, timeout_s: float) -> Any:
    """The store of a sender at ``host:port``."""
    import torch.distributed as dist

    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))


def serve_store(host: str, *, timeout_s: float) -> tuple[Any, str]:
    """A store on a free port of this machine, and its address for others."""
    import torch.distributed as dist

    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
    return store, f"{host}:{store.port}"


def group_store(store: Any, group_key: str, sync_id: int) -> Any:
    """The part of ``store`` that belongs to one forming of one group: stale keys of an earlier try are not seen."""
    import torch.distributed as dist

    return dist.PrefixStore(f"sync/{sync_id}/{group_key}", store)


def send_weights(
    group: BroadcastGroup,
    specs: Sequence[TensorSpec],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    bucket_bytes: int,
) -> int:
    """Broadcast ``tensors``, which come in the order of ``specs``; returns the bytes sent.

    Raises:
        ProtocolError: the stream of tensors differs from the plan.
    """
    import torch

    device = group.device
    buckets = plan_buckets(specs, bucket_bytes)
    manifest = torch.frombuffer(bytearray(encode_manifest(buckets)), dtype=torch.uint8).to(device)
    group.broadcast(torch.tensor([manifest.numel()], dtype=torch.int64, device=device))
    group.broadcast(manifest)
    stream, checksums, total = iter(tensors), [], 0
    for bucket in buckets:
        flat = torch.empty(sum(spec.num_bytes for spec in bucket), dtype=torch.uint8, device=device)
        offset = 0
        for spec in bucket:
            name, tensor = next(stream)
            if name != spec.name or tuple(tensor.shape) != spec.shape:
                raise ProtocolError(
                    f"Weights don't follow their plan: {name} {tuple(tensor.shape)} came where {spec} was due."
                )
            view = (
                tensor.detach()
                .to(device=device, dtype=getattr(torch, spec.dtype))
                .contiguous()
                .view(-1)
                .view(torch.uint8)
            )
            flat[offset : offset + spec.num_bytes] = view
            offset += spec.num_bytes
        checksums.append(_crc(flat))
        group.broadcast(flat)
        total += offset
    group.broadcast(torch.tensor(checksums, dtype=torch.int64, device=device))
    return total


def receive_weights(group: BroadcastGroup, keep: Callable[[str, torch.Tensor], None]) -> int:
    """Receive what ``send_weights`` sends; ``keep(name, tensor)`` is called for each tensor only after all checksums match.

    Raises:
        ProtocolError: a bad manifest or a checksum that differs; nothing was kept.
    """
    import torch

    device = group.device
    length = torch.zeros(1, dtype=torch.int64, device=device)
    group.broadcast(length)
    if not 0 < int(length) <= MAX_MANIFEST_BYTES:
        raise ProtocolError(f"A weight manifest of {int(length)} bytes is out of bounds.")
    manifest = torch.empty(int(length), dtype=torch.uint8, device=device)
    group.broadcast(manifest)
    buckets = decode_manifest(manifest.cpu().numpy().tobytes())
    flats = []
    for bucket in buckets:
        flat = torch.empty(sum(spec.num_bytes for spec in bucket), dtype=torch.uint8, device=device)
        group.broadcast(flat)
        flats.append(flat)
    checksums = torch.empty(len(buckets), dtype=torch.int64, device=device)
    group.broadcast(checksums)
    for index, (flat, expected) in enumerate(zip(flats, checksums.tolist(), strict=True)):
        if _crc(flat) != expected:
            raise ProtocolError(
                f"Bucket {index} of the weights arrived damaged: its checksum differs. The old weights stay."
            )
    for bucket, flat in zip(buckets, flats, strict=True):
        for name, tensor in _split(bucket, flat):
            keep(name, tensor)
    return sum(flat.numel() for flat in flats)


def _split(bucket: Sequence[TensorSpec], flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    offset = 0
    for spec in bucket:
        part = flat[offset : offset + spec.num_bytes]
        if offset % DTYPE_BYTES[spec.dtype]:
            part = part.clone()  # a view needs alignment
        yield spec.name, part.view(getattr(torch, spec.dtype)).view(spec.shape)
        offset += spec.num_bytes


def _crc(flat: torch.Tensor) -> int:
    return zlib.crc32(flat.cpu().numpy())
