"""The sending side of a weight update: one sender for each pipeline stage, which broadcasts its own layers to all engines.

See ``services/coordinator/weight_update.py`` for the sequence. All ranks of the learner call ``publish`` together: tensor ranks gather
their slices, and only the senders talk to engines.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import structlog
import torch

from common.errors import ForebayError
from common.waits import Wait, WaitTable
from protocol import messages as m
from protocol import weights
from services.learner.policy import Policy

log = structlog.get_logger()

BUCKET_BYTES = 256 << 20


@dataclass(frozen=True)
class Published:
    """One update. ``failed`` nodes are fenced by the coordinator. Times in seconds."""

    num_bytes: int
    send_s: float
    acked: list[str]
    failed: dict[str, str]


class WeightSender:
    """This rank's part of the updates. ``store`` lives as long as the learner; groups as long as their membership."""

    def __init__(
        self,
        policy: Policy,
        *,
        host: str,
        timeout_s: float,
        dtype: torch.dtype | None = None,
        waits: WaitTable | None = None,
    ) -> None:
        self._policy = policy
        self._waits = waits or WaitTable()
        self._dtype = dtype
        self._timeout_s = timeout_s
        self._specs = [
            weights.TensorSpec(name, str(kind).removeprefix("torch."), tuple(shape))
            for name, shape, kind in policy.plan_hf_tensors(dtype)
        ]
        self._group: weights.BroadcastGroup | None = None
        self._group_key = ""
        self.address = ""
        if policy.is_sender:
            self._store, self.address = weights.serve_store(host, timeout_s=timeout_s)

    def join(self, plan: m.WeightUpdatePlan) -> str:
        """Form this sender's group, or keep it. Returns an error text, or ''."""
        if (
            not self._policy.is_sender
            or not plan.members
            or (self._group is not None and plan.group_key == self._group_key)
        ):
            return ""
        self.leave()
        try:
            store = weights.group_store(self._store, plan.group_key)
            with self._wait(f"a weight group for {plan.tag}", plan):
                self._group = weights.BroadcastGroup(
                    store, rank=0, world_size=plan.world_size, device=self._policy.device, timeout_s=plan.timeout_s
                )
        except RuntimeError as error:  # torch.distributed raises its subclasses for timeouts and lost peers
            return f"stage {self._policy.stage} could not form a group with {_names(plan)}: {error}"
        self._group_key = plan.group_key
        return ""

    def send(self, plan: m.WeightUpdatePlan) -> tuple[int, str]:
        """Send this stage. Ranks that are no senders only take part in the gathering. Returns (bytes, error text or '')."""
        tensors = self._policy.iter_hf_tensors(self._dtype)
        if not plan.members:
            return 0, ""
        if self._group is None or not self._policy.is_sender:
            for _ in tensors:
                pass
            return 0, ""
        try:
            with self._wait(f"weights {plan.tag} to be taken", plan):
                return weights.send_weights(self._group, self._specs, tensors, bucket_bytes=BUCKET_BYTES), ""
        except RuntimeError as error:
            self.leave()
            for _ in tensors:  # the tensor ranks of this stage are still gathering
                pass
            return 0, f"stage {self._policy.stage} lost an engine while sending: {error}"

    def _wait(self, what: str, plan: m.WeightUpdatePlan) -> AbstractContextManager[Wait]:
        """The coordinator ends the update at its own limit; this one is over only if that could not reach us."""
        timeout_s = 1.5 * plan.timeout_s
        return self._waits.named(what, on=_names(plan), timeout_s=timeout_s, limit_key="run.weight_update_timeout_s")

    def leave(self) -> None:
        """Close the group."""
        if self._group is not None:
            self._group.close()
        self._group, self._group_key = None, ""


def _names(plan: m.WeightUpdatePlan) -> str:
    return ", ".join(member.node_id for member in plan.members)


def publish(
    sender: WeightSender,
    request: m.WeightUpdateRequest,
    *,
    ask: Callable[[m.Message, str], m.Message],
    agree: Callable[[str], str],
    max_attempts: int = 10,
) -> Published:
    """One update of all engines, tried again without those that fail.

    ``ask`` sends rank 0's message to the coordinator and gives every rank the answer; ``agree`` gives every rank the first
    error text that any of them has.

    Raises:
        ForebayError: it failed ``max_attempts`` times.
    """
    reasons = []
    for _ in range(max_attempts):
        started = time.monotonic()
        plan = ask(request, f"a plan to publish {request.tag}")
        assert isinstance(plan, m.WeightUpdatePlan)
        if error := agree(sender.join(plan)):
            ask(m.WeightUpdateFailed(update_id=plan.update_id, error=error), "the end of a failed update")
            sender.leave()
            reasons.append(error)
            continue
        answer = ask(m.WeightUpdateReady(update_id=plan.update_id), f"all engines to be ready for {request.tag}")
        if isinstance(answer, m.TransferStart):
            num_bytes, error = sender.send(plan)
            if error := agree(error):
                ask(m.WeightUpdateFailed(update_id=plan.update_id, error=error), "the end of a failed update")
                sender.leave()
                reasons.append(error)
                continue
            sent = m.TransferDone(update_id=plan.update_id, num_bytes=num_bytes, send_s=time.monotonic() - started)
            answer = ask(sent, f"all engines to hold {request.tag}")
        if isinstance(answer, m.WeightUpdateResult):
            if answer.failed:
                sender.leave()
            return Published(num_bytes, time.monotonic() - started, answer.acked, answer.failed)
        assert isinstance(answer, m.WeightUpdateAborted)
        sender.leave()
        reasons.append(answer.reason)
        log.warning("publish_again", version=str(request.tag), reason=answer.reason)
    raise ForebayError(f"Version {request.tag} could not be published in {max_attempts} tries: {'; '.join(reasons)}.")
