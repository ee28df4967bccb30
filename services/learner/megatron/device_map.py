"""Megatron on CPU: maps its hard-wired ``cuda`` device to ``cpu``.

Megatron-Core asks for ``device="cuda"``, ``torch.cuda.current_device()``, ``Tensor.cuda()`` and tensor types such as
``torch.cuda.FloatTensor`` in dozens of places. ``install`` replaces, once per process, what are functions of
``torch.cuda``; ``scope`` is a function mode for the rest. A mode belongs to a thread, so whoever calls Megatron enters
``scope`` around the call.

Not covered: CUDA graphs, streams that overlap communication, random states of CUDA (we have no dropout).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from common.errors import ForebayError
from services.learner.megatron.mcore import CudaRNGStatesTracker, megatron_random


class _NoStream:
    """Stands for torch.cuda.Stream and Event: the CPU runs in order, so there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...


def install() -> None:
    """Replaces the functions of ``torch.cuda`` that Megatron calls. Once per process is enough; more does no harm.

    Raises:
        ForebayError: this machine has CUDA, where the map would send GPU work to the CPU without a word.
    """
    if torch.cuda.is_available():
        raise ForebayError(
            "The CPU device map of the learner refuses to load where CUDA is available."
            " Set learner.device = 'cuda', or hide the GPUs with CUDA_VISIBLE_DEVICES=''."
        )
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *_: None
    cuda.current_stream = cuda.default_stream = lambda *_: _NoStream()
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.Stream = cuda.Event = _NoStream
    # Dropout is 0 in all our models, so no two ranks need different random states.
    # Recomputed activations set and restore the states, of which CUDA's are none here.
    megatron_random._get_cuda_rng_state = lambda *_, **__: None
    megatron_random._set_cuda_rng_state = lambda *_, **__: None
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()  # type: ignore[method-assign]


@contextlib.contextmanager
def scope(device: torch.device) -> Iterator[None]:
    """Inside, calls of this thread that ask for cuda get cpu, if ``device`` is the CPU; else nothing is changed."""
    if device.type == "cpu":
        with _CudaIsCpu():
            yield
    else:
        yield


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron compares with "torch.cuda.FloatTensor".
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": "cpu"}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **(kwargs or {}))


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )
