"""The receiving side of the weight broadcast, inside vLLM's worker processes (vLLM's ``WeightTransferEngine`` lifecycle).

All bytes are received and their checksums compared before the model is touched, so a failed transfer leaves the old weights
serving; the price is one extra copy of this worker's weights while an update runs. Then ``finish_weight_update`` loads them
through vLLM's layer-wise reload, which also repacks weights where the platform needs it (linear layers on CPU).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from protocol import weights


@dataclass
class ReceiverInit(WeightTransferInitInfo):
    """The groups to join: see ``messages.WeightUpdatePlan``."""

    stores: list[str]
    group_key: str
    first_rank: int
    world_size: int
    timeout_s: float


@dataclass
class ReceiverUpdate(WeightTransferUpdateInfo):
    """Nothing but the version's name: what comes is said by the manifest."""

    version: int


class WeightReceiver(WeightTransferEngine[ReceiverInit, ReceiverUpdate]):
    """One rank in each sender's group."""

    init_info_cls = ReceiverInit
    update_info_cls = ReceiverUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._groups: list[weights.BroadcastGroup] = []
        self._staged: list[tuple[str, torch.Tensor]] = []

    def init_transfer_engine(self, init_info: ReceiverInit) -> None:
        """Join every sender's group as rank ``first_rank`` + this worker's rank in its engine."""
        self.shutdown()
        rank = init_info.first_rank + self.parallel_config.rank
        for address in init_info.stores:
            store = weights.group_store(
                weights.connect_store(address, timeout_s=init_info.timeout_s), init_info.group_key
            )
            self._groups.append(
                weights.BroadcastGroup(
                    store, rank=rank, world_size=init_info.world_size, device=self.device, timeout_s=init_info.timeout_s
                )
            )

    def start_weight_update(self) -> None:
        """Nothing yet: the model stays as it is until everything has arrived."""
        self._staged = []

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive from every sender. vLLM's own version synchronizes an accelerator, which a CPU doesn't have."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ReceiverUpdate) -> None:
        """Stage all tensors of all senders."""
        for group in self._groups:
            weights.receive_weights(group, lambda name, tensor: self._staged.append((name, tensor)))

    def finish_weight_update(self) -> None:
        """Load what was staged; all of vLLM's parameters must be covered, or its reload raises."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(self._staged))
        finalize_layerwise_reload(self.model, self.model_config)
        self._staged = []
        _repack_tied_head(self.model)
        _repack_experts(self.model)

    def shutdown(self) -> None:
        """Close all groups."""
        for group in self._groups:
            group.close()
        self._groups = []


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Bring vLLM's packed copy of a tied output layer up to date.

    On CPU vLLM packs the output layer's weight for its matmul. With tied embeddings no tensor of that name ever arrives, so
    the reload leaves the packed copy as it was, and tokens would be sampled with the old output layer. Elsewhere a no-op.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    modules = list(model.modules())
    embedded = {m.weight.data_ptr() for m in modules if type(m) is VocabParallelEmbedding and hasattr(m, "weight")}
    for module in modules:
        if isinstance(module, ParallelLMHead) and module.weight.data_ptr() in embedded:
            module.quant_method.process_weights_after_loading(module)


def _repack_experts(model: torch.nn.Module) -> None:
    """Pack the experts' new weights for vLLM's CPU kernel.

    On CPU that kernel wants its weights packed. vLLM 0.32 packs them when it builds the kernel, at the first load, and a reload leaves
    them as they came: tokens would be sampled with shuffled experts. Elsewhere a no-op.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.moe_kernel is not None:
            method.moe_kernel.fused_experts.process_weights_after_loading(module)
