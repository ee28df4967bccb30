"""Device memory that is given back while nothing uses it: weights, gradients and optimizer state, moved to the host and back.

The storages themselves are emptied and filled again, so that every tensor, view and buffer of Megatron that points into them stays
valid, and none can keep the memory by accident. What was moved comes back bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Parkable:
    """A set of tensors whose storages can be emptied (``park``) and filled again (``unpark``). Either, again, does nothing.

    ``tensors``: gives them at each ``park``, since an optimizer makes its moments late; several may share a storage. ``keep``: with
    their contents, in host memory (pinned, for a GPU); else they come back as zeros, which is what gradients are between steps.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], *, keep: bool) -> None:
        self._tensors, self._keep = tensors, keep
        self._parked: list[tuple[torch.UntypedStorage, int, Tensor | None]] = []
        self._buffers: dict[int, Tensor] = {}  # host memory by place, used again at the next time

    def park(self) -> int:
        """Returns the bytes of device memory that became free."""
        if self._parked:
            return 0
        storages = {s._cdata: s for s in (tensor.untyped_storage() for tensor in self._tensors()) if s.nbytes()}
        for place, storage in enumerate(storages.values()):
            host = self._copy(place, storage) if self._keep else None
            self._parked.append((storage, storage.nbytes(), host))
        if any(storage.device.type == "cuda" for storage, _, _ in self._parked):
            torch.cuda.synchronize()  # the copies are done
        for storage, _, _ in self._parked:
            storage.resize_(0)
        return sum(nbytes for _, nbytes, _ in self._parked)

    def unpark(self) -> None:
        """Everything as it was."""
        for storage, nbytes, host in self._parked:
            storage.resize_(nbytes)
            if host is None:
                _bytes_of(storage).zero_()
            else:
                _bytes_of(storage).copy_(host, non_blocking=True)
        self._parked.clear()

    def _copy(self, place: int, storage: torch.UntypedStorage) -> Tensor:
        host = self._buffers.get(place)
        if host is None or host.numel() != storage.nbytes():
            pinned = storage.device.type == "cuda"
            host = self._buffers[place] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
        return host.copy_(_bytes_of(storage), non_blocking=True)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


class DeviceMemory:
    """What a learner holds on its device between its phases.

    ``offload_optimizer``: masters and moments come for the optimizer's step (and for checkpoints) only. ``offload_while_waiting``:
    ``rest`` parks all there is; whoever needs some of it asks for it here.
    """

    def __init__(
        self, ddps: Iterable[Any], optimizer: Any, *, offload_optimizer: bool, offload_while_waiting: bool
    ) -> None:
        self._offload_optimizer, self._offload_while_waiting = offload_optimizer, offload_while_waiting
        ddps = tuple(ddps)
        self._weights = Parkable(lambda: _weights(ddps), keep=True)
        self._gradients = Parkable(lambda: _gradients(ddps), keep=False)
        self._optimizer = Parkable(lambda: _optimizer_state(ddps, optimizer), keep=True)

    def need_weights(self) -> None:
        """For a forward pass, or to send or save them."""
        self._weights.unpark()

    def need_gradients(self) -> None:
        """For a backward pass."""
        self._gradients.unpark()

    def need_optimizer(self) -> None:
        """For a step or a checkpoint."""
        self._weights.unpark()  # in float32 they are the masters
        self._optimizer.unpark()

    def release_optimizer(self) -> None:
        """After that."""
        if self._offload_optimizer:
            self._optimizer.park()

    def rest(self) -> int:
        """Before a wait. Returns the bytes that became free."""
        if not self._offload_while_waiting:
            return 0
        return self._optimizer.park() + self._gradients.park() + self._weights.park()


def _weights(ddps: Iterable[Any]) -> Iterable[Tensor]:
    for ddp in ddps:
        yield from (parameter.data for parameter in ddp.parameters())
        for buffer in _buffers(ddp):  # the distributed optimizer's: it may be larger than the parameters in it
            if buffer.param_data is not None:
                yield buffer.param_data


def _gradients(ddps: Iterable[Any]) -> Iterable[Tensor]:
    return (buffer.grad_data for ddp in ddps for buffer in _buffers(ddp))


def _buffers(ddp: Any) -> list[Any]:
    return [*ddp.buffers, *ddp.expert_parallel_buffers]


def _optimizer_state(ddps: Iterable[Any], optimizer: Any) -> Iterable[Tensor]:
    """Masters and moments on the device that are not the weights themselves. Adam's step is on the host for good."""
    own = {tensor.untyped_storage()._cdata for tensor in _weights(ddps)}
    for chained in optimizer.chained_optimizers:
        if chained.optimizer is None:  # a rank without parameters of this kind
            continue
        for group in chained.optimizer.param_groups:
            for parameter in group["params"]:
                for tensor in (parameter.data, *chained.optimizer.state.get(parameter, {}).values()):
                    if isinstance(tensor, Tensor) and tensor.ndim and tensor.untyped_storage()._cdata not in own:
                        yield tensor
