"""Entry point ``vllm.general_plugins``: vLLM calls ``register`` in every one of its processes, so workers find our engine."""

from __future__ import annotations

import os
import signal

from common.lifecycle import die_with_parent

BACKEND = "forebay"
PARENT_ENV = "FOREBAY_ROLLOUT_PID"  # set by a rollout node for its engine processes


def register() -> None:
    """Register the weight receiver, and tie engine processes to the rollout node: they must not outlive it."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "services.rollout.weight_receiver", "WeightReceiver")
    node_pid = os.environ.get(PARENT_ENV)
    if node_pid and int(node_pid) != os.getpid():
        die_with_parent(signal.SIGKILL)
