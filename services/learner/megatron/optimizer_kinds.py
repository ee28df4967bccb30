"""The optimizer's state in a checkpoint, for an optimizer of another kind: sharded over ranks or not, masters of other parameters.

                                  moments                       float32 masters
    distributed                   optimizer.state.exp_avg...    optimizer.state.param.NAME
    not, 16-bit parameters        the same                      optimizer.state.fp32_param.NAME
    not, float32 parameters       the same                      none: the parameter NAME is its own master

All are whole tensors in the shape of the parameter, so a tensor only has to be asked for by the name that it has in the checkpoint. What
Megatron keeps beside the tensors (parameter groups, the scale of float16) is that of the new optimizer, but for Adam's step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from services.learner.megatron.mcore import ShardedTensor, ShardedTensorFactory


def kind(layout: Mapping[str, Any]) -> tuple[str, bool]:
    """Of the optimizer: (dtype of its parameters, whether it is distributed). ``layout`` is a checkpoint's record of them."""
    return layout["dtype"], layout["distributed_optimizer"]


def rename(wanted: dict[str, Any], *, saved: tuple[str, bool], own: tuple[str, bool]) -> None:
    """Masters in ``wanted`` get the names that they have in a checkpoint of kind ``saved``. So do parameters that it has in another 16-bit
    precision: they are read from their masters, and rounded once."""
    from_masters = own[0] != saved[0] and saved[0] != "float32"
    for part, state in wanted.items():
        for tensor in _sharded(state):
            if part == "optimizer" and _masters(own) and tensor.key.startswith(_masters(own)):
                tensor.key = _masters(saved) + tensor.key.removeprefix(_masters(own))
            elif part != "optimizer" and from_masters:
                tensor.key = _masters(saved) + tensor.key


def _masters(kind: tuple[str, bool]) -> str:
    """What stands before a parameter's name in the name of its master."""
    dtype, distributed = kind
    if distributed:
        return "optimizer.state.param."
    return "" if dtype == "float32" else "optimizer.state.fp32_param."


def _sharded(state: Any) -> Iterator[Any]:
    if isinstance(state, ShardedTensor | ShardedTensorFactory):
        yield state
    elif isinstance(state, dict | list):
        for item in state.values() if isinstance(state, dict) else state:
            yield from _sharded(item)


def adam_step(common: Any) -> float:
    """How many steps Adam has done, in what a checkpoint of any kind has beside the optimizer's tensors."""
    if isinstance(common, dict):
        for key in ("common_step", "step"):
            if key in common:
                return float(common[key])
    items = common.values() if isinstance(common, dict) else common if isinstance(common, list) else []
    return max((adam_step(item) for item in items), default=0.0)


def merged(own: Any, tensors: Any) -> Any:
    """``own``, the state of the optimizer at hand, with the loaded ``tensors`` in their places."""
    if isinstance(own, dict) and isinstance(tensors, dict):
        return {key: merged(value, tensors[key]) if key in tensors else value for key, value in own.items()}
    if isinstance(own, list) and isinstance(tensors, list):
        return [merged(value, tensor) for value, tensor in zip(own, tensors, strict=True)]
    return tensors


def set_adam_step(state: dict[str, Any], step: float, *, distributed: bool) -> None:
    """In what one of Megatron's optimizers is to load."""
    inner = state.get("optimizer", state)
    for group in inner["param_groups"]:
        if distributed or "step" in group:  # Transformer Engine's Adam has it there in any kind
            group["step"] = int(step)
    if not distributed:
        inner["state"]["common_step"] = Tensor([step]).squeeze()
