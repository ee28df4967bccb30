"""The learner's loop: a batch in, an optimizer step, the new version out.

    consumes:    Batch, WeightUpdateNeeded, EndOfData
    produces:    the policy's next version in every engine; StepCommitted; checkpoints; the Hugging Face export
    waits for:   the coordinator's batch; the engines during an update
    unblocked by: enough judged groups; a WeightUpdateNeeded when engines without valid weights would otherwise keep it waiting

Every rank of the world (``launch.py``) runs this loop. Rank 0 alone talks to the coordinator, and what it hears goes to the others
as the same bytes.
"""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import Any, NoReturn

import structlog
import torch

from common.errors import InvariantError, PeerError, WaitTimeout
from common.lifecycle import leave
from common.net import own_address_towards
from common.recorder import RECORDER
from common.waits import WaitTable
from protocol import messages as m
from protocol.codec import Received
from protocol.config import RunConfig
from services.learner.batch_samples import make_train_batch
from services.learner.checkpoints import CheckpointError, latest_checkpoint, oldest_step, prune_checkpoints, step_folder
from services.learner.config import LearnerConfig
from services.learner.link import Link, NotYet
from services.learner.policy import Policy
from services.learner.signs import Progress
from services.learner.weight_sender import WeightSender, publish
from services.learner.world import World, fail

log = structlog.get_logger()

MAX_FAILED_CHECKPOINTS = 3


class Learner:
    """See the module. ``run`` is the loop; the other methods are its phases."""

    def __init__(
        self, run: RunConfig, config: LearnerConfig, policy: Policy, world: World, *, node_id: str = ""
    ) -> None:
        self.run_config, self.config, self.policy, self.world = run, config, policy, world
        self.step = self._resume()  # optimizer steps done = the version of the weights at hand
        self.checkpoint_step = self.step if self.step else -1
        self._failed_checkpoints = 0  # one after the other
        self._wait_batch_s = 0.0  # since the last step
        self.link = self._join(node_id) if world.rank == 0 else None
        incarnation = self.link.welcome.tag.incarnation if self.link else 0
        self.incarnation = world.share_int(incarnation, "the run's incarnation")
        host = config.host or own_address_towards(run.address)
        dtype = None if config.publish_dtype == "parameters" else getattr(torch, config.publish_dtype)
        self.sender = WeightSender(
            policy, host=host, timeout_s=run.weight_update_timeout_s, dtype=dtype, waits=world.waits
        )
        self.stores = world.gather_text(self.sender.address, "the addresses of all senders")

    def _join(self, node_id: str) -> Link:
        return Link(
            self.run_config,
            checkpoint_step=self.step,
            node_id=node_id,
            waits=self.world.waits,
            stop_timeout_s=self.config.stop_timeout_s,
        )

    def run(self) -> int:
        """Train until the coordinator says that it is over, or a stop. Returns the exit code."""
        if self.link:
            self.link.stop_on_signals()
        else:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # rank 0 decides, and this rank hears of it
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        while (work := self._next_work()) is not None:
            match work.message:
                case m.Batch() as batch:
                    metrics = self._train(batch, work.arrays)
                    if not self._hand_over(metrics, publish=batch.publish):
                        return self._leave()
                case m.WeightUpdateNeeded():
                    self._resync()
                case m.EndOfData() as end:
                    log.info("end_of_data", reason=end.reason)
                    self._finish()
                    break
        self._last_checkpoint()
        return self._leave()

    def _leave(self) -> int:
        self._settle_checkpoint(wait=True)
        self.sender.leave()
        if self.link:
            self.link.close("done")
            return 0 if self.link.signum is None else 128 + self.link.signum
        return 0

    # ---- phases ----

    def _resume(self) -> int:
        path = latest_checkpoint(self._checkpoints)
        if path is None:
            return 0
        self.world.progress.phase(f"the loading of {path.name}")
        step, _ = self.policy.load_checkpoint(path)
        log.info("resumed", step=step, checkpoint=str(path))
        return step

    def _next_work(self) -> Received | None:
        """Rank 0 waits for the coordinator as long as that takes; the others, in a collective with a limit, hear in between that there
        is nothing yet."""
        started, step = time.monotonic(), self.step + 1
        self.world.progress.phase(f"the wait for the work of step {step}")
        self.policy.rest()
        within_s = None if self.world.size == 1 else self.config.wait_timeout_s / 4
        received: Received | NotYet | None = NotYet()
        while isinstance(received, NotYet):
            received = self.link.next_work(step, within_s=within_s) if self.link else None
            if self.world.share_int(isinstance(received, NotYet), f"word of the work of step {step}"):
                received = NotYet()
        work = self.world.share_message(received, f"the work of step {step}", run_id=self.run_config.id)
        self._wait_batch_s += time.monotonic() - started
        return work

    def _train(self, batch: m.Batch, arrays: dict[str, Any]) -> dict[str, float]:
        if batch.step != self.step + 1:
            raise InvariantError(f"The learner is at step {self.step} and was given the batch of step {batch.step}.")
        started = time.monotonic()
        self.world.progress.phase(f"train step {batch.step}")
        given = make_train_batch(
            batch,
            arrays,
            self.config.objective,
            max_completion_tokens=self.run_config.max_completion_tokens,
            reference_logprobs=self.policy.reference_logprobs,
        )
        metrics = given.metrics
        if given.samples:
            stats = self.policy.train_step(given.samples, total_steps_done=self.step)
            metrics |= {f"train/{name}": float(value) for name, value in vars(stats).items() if value is not None}
        else:  # a step without gradient would only decay the moments
            log.warning("step_without_signal", step=batch.step, groups_without_signal=metrics["batch/no_signal_groups"])
        self.step += 1
        waited_s, self._wait_batch_s = self._wait_batch_s, 0.0
        return metrics | {"time/train_s": time.monotonic() - started, "time/wait_batch_s": waited_s}

    def _hand_over(self, metrics: dict[str, float], *, publish: bool) -> bool:
        """Publish and commit the step. False: the run was stopped meanwhile and the coordinator is gone, so the step never was: its
        batch is fixed in the journal and trained again when the run goes on."""
        try:
            if publish and not self._was_told("run_stopped"):  # without a run there is no engine that needs it
                metrics = metrics | self._publish(only_fenced=False)
            self._commit(metrics)
        except (PeerError, WaitTimeout) as error:
            if not self._was_told("stopping"):
                raise
            log.warning("step_discarded", step=self.step, reason=str(error))
            return False
        return True

    def _resync(self) -> None:
        try:
            self._publish(only_fenced=True)
        except (PeerError, WaitTimeout) as error:
            if not self._was_told("stopping"):
                raise
            log.warning("resync_given_up", reason=str(error))  # the run was stopped, and the coordinator is gone

    def _was_told(self, what: str) -> bool:
        """What rank 0's link was told, on every rank."""
        told = bool(getattr(self.link, what)) if self.link else False
        return bool(self.world.share_int(told, "whether to stop"))

    def _publish(self, *, only_fenced: bool) -> dict[str, float]:
        request = m.WeightUpdateRequest(
            tag=m.VersionTag(version=self.step, incarnation=self.incarnation),
            stores=self.stores,
            only_fenced=only_fenced,
        )
        started = time.monotonic()
        self.world.progress.phase(f"the update of the engines to {request.tag}")
        done = publish(self.sender, request, ask=self._ask, agree=self.world.first_text)
        return {
            "time/weight_update_s": time.monotonic() - started,
            "weight_update/bytes": float(done.num_bytes),
            "weight_update/acked": float(len(done.acked)),
            "weight_update/failed": float(len(done.failed)),
        }

    def _commit(self, metrics: dict[str, float]) -> None:
        self._settle_checkpoint(wait=False)
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._ask(
            m.StepCommitted(
                step=self.step,
                metrics=finite,
                checkpoint_step=self.checkpoint_step,
                replay_from=oldest_step(self._checkpoints),
            ),
            f"commit of step {self.step}",
        )
        if self.step % self.config.checkpoint_interval_steps == 0:
            self._begin_checkpoint()
        if self.config.export_interval_steps and self.step % self.config.export_interval_steps == 0:
            log.info("export", step=self.step, path=str(self._export(f"exports/step-{self.step:08d}")))

    def _begin_checkpoint(self) -> None:
        """The files are written while the next steps run. A disk that is full now may have room at the next one."""
        self._settle_checkpoint(wait=True)
        self.world.progress.phase(f"the beginning of the checkpoint of step {self.step}")
        try:
            self.policy.begin_checkpoint(self._checkpoints, self.step, {"incarnation": self.incarnation})
        except CheckpointError as error:
            self._checkpoint_failed(error)
        if not self.config.async_checkpoints:
            self._settle_checkpoint(wait=True)

    def _settle_checkpoint(self, *, wait: bool) -> None:
        """Take note of a checkpoint that has become whole; with ``wait`` until it has."""
        self.world.progress.phase("the end of a checkpoint")
        try:
            step = self.policy.finish_checkpoint(wait=wait)
        except CheckpointError as error:
            self._checkpoint_failed(error)
            return
        if step is None:
            return
        self.checkpoint_step, self._failed_checkpoints = step, 0
        if self.world.rank == 0:
            prune_checkpoints(self._checkpoints, keep=self.config.keep_checkpoints)
            log.info("checkpoint", step=step, path=str(step_folder(self._checkpoints, step)))

    def _checkpoint_failed(self, error: CheckpointError) -> None:
        """On all ranks alike."""
        self._failed_checkpoints += 1
        if self._failed_checkpoints == MAX_FAILED_CHECKPOINTS:
            raise error
        log.error("checkpoint_failed", error=str(error), last_good=self.checkpoint_step)

    def _last_checkpoint(self) -> None:
        """The state as it is now, whole before this returns.

        Raises:
            CheckpointError: it could not be written.
        """
        self._settle_checkpoint(wait=True)
        if self.step != max(0, self.checkpoint_step):
            self._failed_checkpoints = MAX_FAILED_CHECKPOINTS - 1  # there is no next one
            self._begin_checkpoint()
            self._settle_checkpoint(wait=True)

    def _export(self, name: str) -> Path:
        target = Path(self.run_config.run_dir) / name
        self.world.progress.phase(f"the export to {name}")
        self.policy.export_hf(target)
        return target

    def _finish(self) -> None:
        export_dir = self._export("export")
        self._last_checkpoint()
        try:
            self._ask(m.LearnerDone(export_dir=str(export_dir)), "the end of the run")
        except (PeerError, WaitTimeout):
            if not self._was_told("run_stopped"):  # that says as much as the answer, which was lost
                raise

    # ---- talking ----

    def _ask(self, message: m.Message, what: str) -> m.Message:
        """Rank 0 asks the coordinator; every rank gets the answer."""
        answer, error = None, None
        if self.link:
            # Of an update the coordinator's own limit comes first. What it has to keep may wait for space on its disk.
            limit = (self.run_config.weight_update_timeout_s * 1.5, "run.weight_update_timeout_s")
            if isinstance(message, m.StepCommitted | m.LearnerDone):
                limit = (self.run_config.ack_timeout_s, "run.ack_timeout_s")
            try:
                answer = Received(self.link.ask(message, what=what, timeout_s=limit[0], limit_key=limit[1]), "", 0, 0)
            except (PeerError, WaitTimeout) as caught:  # the other ranks wait to hear of it
                error = caught
        shared = self.world.share_message(answer, what, run_id=self.run_config.id)
        if shared is None:
            raise error or PeerError(f"Rank 0 of the learner got no {what} from the coordinator; its log says why.")
        return shared.message

    @property
    def _checkpoints(self) -> Path:
        return Path(self.run_config.run_dir) / "checkpoints"


def make_policy(run: RunConfig, config: LearnerConfig, progress: Progress) -> Policy:
    """The policy that the config names; imports Megatron only for Megatron."""
    if config.policy == "fake":
        from services.learner.fake_policy import FakePolicy, init_world

        return FakePolicy(
            step_s=config.fake_step_s,
            rank=init_world(timeout_s=config.wait_timeout_s),
            die_at_step=config.fake_die_at_step,
            gap_alarm=config.fake_gap_alarm,
        )
    from services.learner.megatron.policy import MegatronPolicy

    return MegatronPolicy(
        config,
        run.model,
        seed=run.seed,
        deterministic=config.deterministic,
        temperature=run.temperature,
        progress=progress,
    )


def main(run: RunConfig, config: LearnerConfig, *, node_id: str = "") -> NoReturn:
    """Body of one rank of the learner. Ends the process with its exit code."""
    waits, progress, world = WaitTable(), Progress(), None
    rank = int(os.environ.get("RANK", "0"))
    RECORDER.describe("learner", run_dir=run.run_dir, node_id=f"learner-rank{rank}" if rank else node_id, waits=waits)
    try:
        policy = make_policy(run, config, progress)
        world = World(policy.device, waits=waits, timeout_s=config.wait_timeout_s, progress=progress)
        code = Learner(run, config, policy, world, node_id=node_id).run()
    except Exception as error:
        fail(error, world)
    world.close()
    leave(code)
