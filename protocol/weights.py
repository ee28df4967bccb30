"""The data plane of a weight update: tensors under their Hugging Face names, in flat buckets, over one broadcast group.

The plan is made on CPU from names, dtypes and shapes alone. On the wire, for each sender (pipeline stage), rank 0 broadcasts:

    1. int64 [1]        length of the manifest
    2. uint8 [length]   manifest: msgpack of the buckets' tensors
    3. uint8 [n]        each bucket's bytes, in order
    4. int64 [buckets]  CRC-32 of each bucket, which the receiver compares before it uses anything

``torch`` is imported only inside the functions that move bytes: importing this module loads no torch.
"""

from __future__ import annotations

import threading
import time
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
        if min(spec.shape, default=0) < 0:
            raise ProtocolError(f"The weight manifest has {spec.name} with shape {spec.shape}.")
        if spec.dtype not in DTYPE_BYTES:
            raise ProtocolError(
                f"The weight manifest has {spec.name} as {spec.dtype}; only {sorted(DTYPE_BYTES)} travel."
            )
    return buckets


class BroadcastGroup:
    """One sender's process group, outside torch's default one: rank 0 sends, the others receive.

    NCCL on CUDA tensors, gloo on CPU tensors. Neither can be relied on to end a wait for a peer that is frozen or gone, so all
    waits here look at the group's store too, and ``abort_group`` ends them on every rank. A group that was aborted or that
    failed is of no use any more: close it and form another, under another key.
    """

    def __init__(self, store: Any, *, rank: int, world_size: int, device: torch.device, timeout_s: float) -> None:
        """Rendezvous with the other ranks through ``store``, which is ``group_store``'s, within ``timeout_s``.

        Raises:
            RuntimeError: a rank did not come, or the group was aborted.
        """
        import torch.distributed as dist

        timeout = timedelta(seconds=timeout_s)
        self.device = device
        self._store = store
        self._in_flight: Any = None
        store.set(f"here/{rank}", "")
        deadline = time.monotonic() + timeout_s
        for other in range(world_size):  # torch's own rendezvous can't be interrupted, but is quick when all are here
            while not store.check([f"here/{other}"]):
                self._check_aborted()
                if time.monotonic() > deadline:
                    raise RuntimeError(f"rank {other} of {world_size} did not come within {timeout_s:g} s")
                time.sleep(0.02)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = dist.ProcessGroupNCCL(store, rank, world_size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, world_size, timeout)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Fill ``tensor`` on all ranks with rank 0's; returns when it is usable.

        Raises:
            RuntimeError: a rank is gone, or the group was aborted.
        """
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank = 0
        if self._group is None:
            raise RuntimeError("the group was closed")
        self._in_flight = work = self._group.broadcast([tensor], options)
        num_looks = 0
        while not work.is_completed():
            num_looks += 1
            if num_looks % 50 == 0:
                self._check_aborted()
            time.sleep(min(1e-5 * num_looks, 2e-3))
        work.wait()  # raises what went wrong; on CUDA the current stream waits for the data

    def _check_aborted(self) -> None:
        if self._store.check(["aborted"]):
            raise RuntimeError(f"the update was called off: {self._store.get('aborted').decode()}")

    def close(self) -> None:
        """Leave the group; safe to call twice. Peers that sit in a broadcast with this process lose the connection."""
        group, work, self._group, self._in_flight = self._group, self._in_flight, None, None
        if group is None:
            return
        if self.device.type == "cuda":
            group.abort()
        elif work is not None and not work.is_completed():
            # gloo's destructor waits for the broadcast with the interpreter's lock held: not before it has ended by itself
            threading.Thread(target=_let_end, args=[group, work], name="retired-group", daemon=True).start()


def _let_end(group: Any, work: Any) -> None:
    while not work.is_completed():  # not wait(): a daemon thread inside torch crashes the process at its exit
        time.sleep(0.05)


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


def group_store(store: Any, group_key: str) -> Any:
    """The part of ``store`` that belongs to one group. A key is never used for two groups, so nothing in it is stale."""
    import torch.distributed as dist

    return dist.PrefixStore(group_key, store)


def abort_group(addresses: Sequence[str], group_key: str, reason: str, *, timeout_s: float) -> None:
    """End every wait in the groups ``group_key`` of all senders, in all processes, with ``reason``."""
    for address in addresses:
        group_store(connect_store(address, timeout_s=timeout_s), group_key).set("aborted", reason)


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
