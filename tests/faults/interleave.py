"""Set-before-wait, in one process: a request for a batch and what completes the batch arrive in random orders.

A coordinator without a socket is given the messages of one step after the other; whatever their order, the request must have been
answered with the batch when all of them are in.
"""

from __future__ import annotations

import asyncio
import logging
import random
from pathlib import Path

import numpy as np
import structlog

from protocol import messages as m
from protocol.codec import Array, Received
from protocol.config import RunConfig
from protocol.suites import AssertSuite
from protocol.tasks import Task
from protocol.verdicts import JudgeResult, Verdict
from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.core import Core, SavedRun
from services.coordinator.core.effects import Record
from services.coordinator.journal import Journal

_SUITE = AssertSuite(kind="asserts", entry_point="f", code="assert f(1) == 1")


class _Desk:
    """A coordinator, and what it answers at once."""

    def __init__(self, folder: Path, steps: int) -> None:
        run = RunConfig(id="orders", dir=folder, model=folder)
        config = CoordinatorConfig(tasks=folder, group_size=2, groups_per_step=1, max_steps=steps, max_staleness=0)
        self.journal = Journal(folder / "orders.sqlite", run_id="orders")
        tasks = [Task(task_id="0", prompt="p", tests=_SUITE)]
        saved = SavedRun(self.journal.run_uid, self.journal.meta, self.journal.state)
        self._core = Core(run, config, tasks, saved, now=0.0, epoch_s=0.0, lease_prefix="orders")
        self._seq = 0
        self.records: list[Record] | None = None  # a list: all that the journal is to have

    def say(self, node: str, message: m.Message, arrays: dict[str, Array] | None = None) -> list[m.Message]:
        """All that goes out because of ``message``."""
        self._seq += 1
        received = Received(message, "orders", self._seq, 0, arrays or {})
        effects = self._core.handle([(f"{node}#1".encode(), received)], 0.0)
        if self.records is not None:
            self.records += effects.records
        return [send.message for send in effects.sends]

    def write(self) -> None:
        """``records`` into the journal."""

        async def submit() -> None:
            await self.journal.submit(self.records or [])

        asyncio.run(submit())


def lost_wakeups(folder: Path, *, count: int, seed: int) -> int:
    """Of ``count`` steps, in how many the request for a batch went unanswered."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    chance = random.Random(seed)
    desk = _Desk(folder, count)
    lost = 0
    try:
        desk.say("judge", m.Hello(role="reward", node_id="judge", host="h", pid=1, capacity=4))
        desk.say("learner", m.Hello(role="learner", node_id="learner", host="h", pid=1))
        newest = m.VersionTag(version=count)  # so that it is never fenced
        out = desk.say("gen", m.Hello(role="rollout", node_id="gen", host="h", pid=1, capacity=4, holds=newest))
        for step in range(1, count + 1):
            [lease] = [message for message in out if isinstance(message, m.GenerateLease)]
            lost += not _one_order(desk, chance, step, lease)
            out = desk.say("learner", m.StepCommitted(step=step, metrics={}))
    finally:
        desk.journal.close()
        structlog.reset_defaults()
    return lost


def _one_order(desk: _Desk, chance: random.Random, step: int, lease: m.GenerateLease) -> bool:
    """The messages of a step in a random order that is possible; whether its batch came."""
    waiting: list[m.Message] = [m.BatchRequest(step=step)] * chance.choice((1, 1, 2))  # a request may be repeated
    waiting += [_sample(lease, index, step - 1) for index in lease.sample_indices]
    came = False
    while waiting:
        message = waiting.pop(chance.randrange(len(waiting)))
        is_sample = isinstance(message, m.SampleResult)
        node = "gen" if is_sample else "judge" if isinstance(message, m.ScoreResult) else "learner"
        out = desk.say(node, message, _arrays() if is_sample else None)
        came |= any(isinstance(each, m.Batch) and each.step == step for each in out)
        waiting += [_score(each) for each in out if isinstance(each, m.ScoreLease)]
    return came


def _sample(lease: m.GenerateLease, index: int, version: int) -> m.SampleResult:
    return m.SampleResult(
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        sample_index=index,
        text=f"text {index}",
        finish_reason="stop",
        segments=[m.Segment(version=version, num_tokens=3)],
    )


def _arrays() -> dict[str, Array]:
    return {
        "prompt_ids": np.zeros(2, np.int32),
        "completion_ids": np.zeros(3, np.int32),
        "logprobs": np.zeros(3, np.float32),
    }


def _score(lease: m.ScoreLease) -> m.ScoreResult:
    result = JudgeResult(verdict=Verdict.ACCEPTED, reward=float(lease.sample_index))
    return m.ScoreResult(
        lease_id=lease.lease_id, group_id=lease.group_id, sample_index=lease.sample_index, result=result
    )
