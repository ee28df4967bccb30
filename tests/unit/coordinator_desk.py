"""The coordinator's core without a socket, for tests: what goes in, and what comes out."""

import time

import numpy as np

from common.loop_watch import LoopWatch
from protocol import messages as m
from protocol.codec import Received
from protocol.config import RunConfig
from protocol.suites import AssertSuite
from protocol.tasks import Task
from protocol.verdicts import JudgeResult, Verdict
from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.core import Core, SavedRun
from services.coordinator.core.steps import FIRST_STEPS, RECENT_STEPS
from services.coordinator.journal import Journal

BROKEN = JudgeResult(verdict=Verdict.INFRA_ERROR, message="no disk")
RIGHT = JudgeResult(verdict=Verdict.ACCEPTED, reward=1.0, cpu_s=0.5)
SUITE = AssertSuite(kind="asserts", entry_point="f", code="assert f(1) == 1")
V1 = m.VersionTag(version=1)


monotonic = time.monotonic  # tests put another clock here


class Desk:
    """A core on a journal, and what it sends to whom."""

    def __init__(self, tmp_path, **changes):
        run = RunConfig(id="r", dir=tmp_path, model=tmp_path, routing_replay=changes.pop("routing_replay", False))
        values = {"tasks": "t", "group_size": 2, "groups_per_step": 1, "max_steps": 9, "max_staleness": 1}
        tasks = [Task(task_id=str(i), prompt="p", tests=SUITE) for i in range(5)]
        self.journal = Journal(tmp_path / "j.sqlite", run_id="r")
        journal = self.journal
        first, recent = journal.steps(first=FIRST_STEPS, last=RECENT_STEPS)
        saved = SavedRun(journal.run_uid, journal.meta, journal.state, first, recent)
        self.core = Core(
            run, CoordinatorConfig(**values | changes), tasks, saved,
            now=monotonic(), epoch_s=time.time() - monotonic(), lease_prefix=f"{id(self):x}",
        )  # fmt: skip
        self.run, self.config, self.tasks, self.loop_watch = run, self.core.config, tasks, LoopWatch()  # for a status
        self.records = []
        self.seq = 0

    def close(self):
        """The ledger closes, whatever the test did."""
        pool = self.core.pool
        pool.ledger.check(buffered=pool.buffered_tokens, live_groups=len(pool.groups))
        self.journal.close()

    def join(self, role, name, life=1, capacity=2, host="h"):
        hello = m.Hello(role=role, node_id=name, host=host, pid=life, capacity=capacity, holds=m.VersionTag(version=0))
        return self.say(f"{name}#{life}", hello if role == "rollout" else hello.model_copy(update={"holds": None}))

    def say(self, identity, message, **arrays):
        """What the coordinator sends because of ``message``: [(identity, message)]."""
        self.seq += 1
        message = Received(message, "r", self.seq, 0, arrays)
        return self._take(self.core.handle([(identity.encode(), message)], monotonic()))

    def tick(self, now, **changes):
        """What the coordinator sends because of the time."""
        return self._take(self.core.tick(now, **changes))

    def write(self):
        """All records so far into the journal."""
        self.tick(monotonic())
        self.journal._queue.put((self.records, None))
        self.records = []

    def _take(self, effects):
        self.effects = effects
        self.records += effects.records
        self.arrays = [send.arrays for send in effects.sends]
        self.answers_to = [send.re for send in effects.sends]
        return [(send.identity.decode(), send.message) for send in effects.sends]

    def score(self, identity, lease, result):
        fields = {name: getattr(lease, name) for name in ("lease_id", "group_id", "sample_index")}
        return self.say(identity, m.ScoreResult(**fields, result=result))

    def samples_of(self, group_id):
        return self.core.pool.groups[group_id].samples

    def sample(self, identity, lease, index, **changes):
        result = m.SampleResult(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            sample_index=index,
            text=changes.pop("text", f"text {index}"),
            finish_reason="stop",
            segments=changes.pop("segments", [m.Segment(version=0, num_tokens=3)]),
        )
        arrays = {
            "prompt_ids": np.zeros(2, np.int32),
            "completion_ids": np.zeros(3, np.int32),
            "logprobs": np.zeros(3, np.float32),
        }
        return self.say(identity, result, **arrays | changes)


def of(kind, sent):
    return [(to, message) for to, message in sent if isinstance(message, kind)]
