"""The start model, for the KL: its weights stay on the host, and change places with the trained ones for a forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class ReferenceWeights:
    """A copy on the host of this rank's parameters, as they are now. Whatever the layout: it is cut as they are.

    Needs no memory of the device, and of the host as much as this rank's parameters take.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._pairs: list[tuple[torch.nn.Parameter, Tensor]] = [
            (p, p.detach().to("cpu", copy=True)) for p in parameters
        ]

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the model has the weights of the copy; afterwards its own again, bit for bit, also after an error."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for parameter, here in self._pairs:
            kept = parameter.detach().to("cpu", copy=True)
            parameter.copy_(here)
            here.copy_(kept)
