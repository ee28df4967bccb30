"""A coordinator without a socket, for tests: what goes in, and what is in the outbox after it."""

import numpy as np

from protocol import messages as m
from protocol.codec import Received
from protocol.config import RunConfig
from protocol.suites import AssertSuite
from protocol.tasks import Task
from protocol.verdicts import JudgeResult, Verdict
from services.coordinator.config import CoordinatorConfig
from services.coordinator.journal import Journal
from services.coordinator.service import Coordinator

BROKEN = JudgeResult(verdict=Verdict.INFRA_ERROR, message="no disk")
RIGHT = JudgeResult(verdict=Verdict.ACCEPTED, reward=1.0, cpu_s=0.5)
SUITE = AssertSuite(kind="asserts", entry_point="f", code="assert f(1) == 1")
V1 = m.VersionTag(version=1)


class Desk:
    """A coordinator and what it said to whom."""

    def __init__(self, tmp_path, **changes):
        run = RunConfig(id="r", dir=tmp_path, model=tmp_path, routing_replay=changes.pop("routing_replay", False))
        values = {"tasks": "t", "group_size": 2, "groups_per_step": 1, "max_steps": 9, "max_staleness": 1}
        tasks = [Task(task_id=str(i), prompt="p", tests=SUITE) for i in range(5)]
        self.journal = Journal(tmp_path / "j.sqlite", run_id="r")
        self.coordinator = Coordinator(
            run, CoordinatorConfig(**values | changes), tasks, socket=None, journal=self.journal
        )
        self.seq = 0

    def close(self):
        """The ledger closes, whatever the test did."""
        pool = self.coordinator.pool
        pool.ledger.check(buffered=pool.buffered_tokens, live_groups=len(pool.groups))
        self.journal.close()

    def join(self, role, name, life=1, capacity=2, host="h"):
        hello = m.Hello(role=role, node_id=name, host=host, pid=life, capacity=capacity, holds=m.VersionTag(version=0))
        return self.say(f"{name}#{life}", hello if role == "rollout" else hello.model_copy(update={"holds": None}))

    def say(self, identity, message, **arrays):
        """What the coordinator sends because of ``message``: [(identity, message)]."""
        self.seq += 1
        self.coordinator._handle(identity.encode(), Received(message, "r", self.seq, 0, arrays))
        self.coordinator._give_out()
        outbox, self.coordinator._outbox = self.coordinator._outbox, []
        self.arrays = [arrays for _, _, _, arrays in outbox]
        self.answers_to = [re for _, _, re, _ in outbox]
        return [(to.decode(), message) for to, message, _, _ in outbox]

    def score(self, identity, lease, result):
        fields = {name: getattr(lease, name) for name in ("lease_id", "group_id", "sample_index")}
        return self.say(identity, m.ScoreResult(**fields, result=result))

    def samples_of(self, group_id):
        return self.coordinator.pool.groups[group_id].samples

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
