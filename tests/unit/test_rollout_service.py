"""A rollout node's own account of its time, with an engine whose updates take as long as the test says."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from common.errors import ForebayError
from common.waits import WaitTable
from protocol import messages as m
from protocol.config import RunConfig
from protocol.versions import VersionTag
from services.rollout.config import RolloutConfig
from services.rollout.engine import Completion, EngineDied
from services.rollout.service import RolloutNode

PLAN = m.WeightUpdatePlan(
    update_id=1, tag=VersionTag(version=1), stores=[], members=[], world_size=1, group_key="k", timeout_s=9.0
)


class IdleEngine:
    """What a node asks of its engine without work."""

    holds = VersionTag(version=0)
    num_workers = 1

    def generated_tokens(self):
        return 0


async def test_the_time_of_pauses_is_the_sum_of_all_of_them_failed_ones_too(tmp_path, monkeypatch):
    clock = [50.0]
    monkeypatch.setattr("services.rollout.service.time.monotonic", lambda: clock[0])
    pauses = iter([0.5, 2.0, -1.25, 0.25])

    class Engine(IdleEngine):
        async def update_weights(self, plan):
            pause = next(pauses)
            clock[0] += abs(pause)
            if pause < 0:
                raise ForebayError("the engine lost its peer")
            return pause

    run = RunConfig(id="r", dir=tmp_path, model=tmp_path)
    channel = SimpleNamespace(capacity=0)
    node = RolloutNode(run, RolloutConfig(engine="fake"), Engine(), channel, WaitTable())
    seen = [channel.beat_fields()["counters"]["paused_s"]]
    for fails in (False, False, True, False):
        if fails:
            with pytest.raises(ForebayError):
                await node._update(PLAN)
        else:
            await node._update(PLAN)
        clock[0] += 10  # between two of them it generates
        seen.append(channel.beat_fields()["counters"]["paused_s"])
    assert seen == [0.0, 0.5, 2.5, 3.75, 4.0]


@pytest.mark.parametrize("call", ["form_groups", "update_weights"])
async def test_an_engine_that_is_found_dead_during_an_update_ends_the_node(tmp_path, call):
    class Engine(IdleEngine):
        async def form_groups(self, plan, member):
            if call == "form_groups":
                raise EngineDied("vLLM's engine process died")

        async def update_weights(self, plan):
            raise EngineDied("vLLM's engine process died")

    told = []

    async def request(message, arrays=None):
        told.append(message.kind)
        return SimpleNamespace(message=message)

    channel = SimpleNamespace(
        capacity=0, node_id="a", request=request, failed=asyncio.get_running_loop().create_future()
    )
    run = RunConfig(id="r", dir=tmp_path, model=tmp_path)
    node = RolloutNode(run, RolloutConfig(engine="fake"), Engine(), channel, WaitTable())
    plan = PLAN.model_copy(update={"members": [m.WeightUpdateMember(node_id="a", first_rank=1, num_workers=1)]})
    await node._take_weights(plan)
    assert isinstance(channel.failed.exception(), EngineDied)
    assert "weight_update_failed" not in told, "a dead engine's node leaves; it doesn't serve on with old weights"


@pytest.mark.parametrize("ends", [True, False])
async def test_the_limit_of_a_lease_is_for_the_generation_and_not_for_its_acknowledgement(tmp_path, ends):
    class Engine(IdleEngine):
        async def generate(self, prompt, sample_indices, sampling, seed):
            ids = np.ones(1, np.int32)
            yield Completion(0, ids, ids, np.zeros(1, np.float32), "x", "stop", [m.Segment(version=0, num_tokens=1)])
            if not ends:
                await asyncio.Event().wait()

    told = []

    async def request(message, arrays=None):
        if isinstance(message, m.SampleResult) and ends:
            await asyncio.sleep(0.2)
        told.append(message)
        return SimpleNamespace(message=m.Ack())

    channel = SimpleNamespace(capacity=1, request=request)
    run = RunConfig(id="r", dir=tmp_path, model=tmp_path)
    node = RolloutNode(run, RolloutConfig(engine="fake"), Engine(), channel, WaitTable())
    sampling = m.Sampling(max_tokens=1, temperature=1.0)
    lease = m.GenerateLease(
        lease_id="l", group_id=1, task_id="t", prompt="p", sample_indices=[0], sampling=sampling, seed=0, timeout_s=0.1
    )
    node._begin(lease)
    await asyncio.wait(node._leases.values())
    failed = [message.error for message in told if isinstance(message, m.LeaseFailed)]
    assert failed == ([] if ends else ["not generated within coordinator.generate_timeout_s = 0.1 s"])
    assert any(isinstance(message, m.SampleResult) for message in told)


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_lease_that_is_given_up_is_open_until_the_coordinator_has_the_samples_that_were_finished(
    tmp_path, is_over
):
    """Else the coordinator takes the node for idle and its tokens for thrown away, and counts them again when the sample comes."""

    class Engine:
        holds = VersionTag(version=0)
        num_workers = 1

        def generated_tokens(self):
            return 3

        async def generate(self, prompt, sample_indices, sampling, seed):
            ids = np.ones(3, np.int32)
            yield Completion(0, ids, ids, np.zeros(3, np.float32), "x", "stop", [m.Segment(version=0, num_tokens=3)])
            if not is_over:
                await asyncio.Event().wait()

    told, sent, acknowledged = [], asyncio.Event(), asyncio.Event()

    async def request(message, arrays=None):
        told.append(message.kind)
        if isinstance(message, m.SampleResult):
            sent.set()
            await acknowledged.wait()
        return SimpleNamespace(message=m.Ack())

    channel = SimpleNamespace(capacity=1, request=request)
    run = RunConfig(id="r", dir=tmp_path, model=tmp_path)
    node = RolloutNode(run, RolloutConfig(engine="fake"), Engine(), channel, WaitTable())
    sampling = m.Sampling(max_tokens=3, temperature=1.0)
    node._begin(
        m.GenerateLease(
            lease_id="l",
            group_id=1,
            task_id="t",
            prompt="p",
            sample_indices=[0, 1],
            sampling=sampling,
            seed=0,
            timeout_s=60,
        )
    )
    await sent.wait()
    for _ in range(3):  # heartbeats' answers say it again and again
        node._cancel("l")
        for _ in range(10):
            await asyncio.sleep(0)
        assert channel.beat_fields()["lease_ids"] == ["l"]
        assert told == ["sample_result"]
    acknowledged.set()
    await asyncio.wait(node._leases.values())
    await asyncio.sleep(0)
    assert told == ["sample_result"] + (["lease_cancelled"] if not is_over else [])
    hello = channel.hello_fields()
    assert (hello["settled_tokens"], hello["open_leases"], channel.beat_fields()["lease_ids"]) == (3, [], [])


class Pushes:
    """A channel that has been sent these messages."""

    node_id, capacity = "a", 1

    def __init__(self, *messages, answer=None):
        self.pushes, self.told, self.answer = asyncio.Queue(), [], answer or m.Ack()
        for message in (*messages, m.Shutdown(reason="that is all")):
            self.pushes.put_nowait(SimpleNamespace(message=message))

    async def request(self, message, arrays=None):
        self.told.append(message)
        return SimpleNamespace(message=self.answer)


async def test_a_lease_that_comes_twice_is_worked_on_once(tmp_path):
    """Else its first end would be taken for that of both, and what the second one generates be counted twice."""
    begun = []

    class Engine(IdleEngine):
        async def generate(self, prompt, sample_indices, sampling, seed):
            begun.append(prompt)
            ids = np.ones(1, np.int32)
            yield Completion(0, ids, ids, np.zeros(1, np.float32), "x", "stop", [m.Segment(version=0, num_tokens=1)])

    sampling = m.Sampling(max_tokens=1, temperature=1.0)
    lease = m.GenerateLease(
        lease_id="l", group_id=1, task_id="t", prompt="p", sample_indices=[0], sampling=sampling, seed=0, timeout_s=9.0
    )
    channel = Pushes(lease, lease)
    run = RunConfig(id="r", dir=tmp_path, model=tmp_path)
    node = RolloutNode(run, RolloutConfig(engine="fake"), Engine(), channel, WaitTable())
    await node._serve_pushes()
    await asyncio.wait(node._leases.values())
    assert begun == ["p"]
    assert [message.kind for message in channel.told] == ["sample_result"]


async def test_a_plan_that_comes_twice_or_late_and_an_abort_of_another_one_change_nothing(tmp_path):
    formed, left = [], []

    class Engine(IdleEngine):
        async def form_groups(self, plan, member):
            formed.append(plan.update_id)
            await asyncio.sleep(0.05)

        async def leave_groups(self):
            left.append(True)

        async def update_weights(self, plan):
            return 0.0

    plan = PLAN.model_copy(
        update={"update_id": 7, "members": [m.WeightUpdateMember(node_id="a", first_rank=1, num_workers=1)]}
    )
    older = plan.model_copy(update={"update_id": 6})
    channel = Pushes(plan, plan, older, m.WeightUpdateAborted(update_id=6, reason="late"))
    run = RunConfig(id="r", dir=tmp_path, model=tmp_path)
    node = RolloutNode(run, RolloutConfig(engine="fake"), Engine(), channel, WaitTable())
    await node._serve_pushes()
    await node._weight_update
    assert (formed, left) == ([7], [])
    assert [message.kind for message in channel.told] == ["weight_update_ready", "weights_loaded"]


async def test_who_hears_of_an_abort_only_as_the_answer_to_its_ready_leaves_the_groups(tmp_path):
    left = []

    class Engine(IdleEngine):
        async def form_groups(self, plan, member):
            pass

        async def leave_groups(self):
            left.append(True)

    plan = PLAN.model_copy(update={"members": [m.WeightUpdateMember(node_id="a", first_rank=1, num_workers=1)]})
    channel = Pushes(plan, answer=m.WeightUpdateAborted(update_id=1, reason="it is over"))
    run = RunConfig(id="r", dir=tmp_path, model=tmp_path)
    node = RolloutNode(run, RolloutConfig(engine="fake"), Engine(), channel, WaitTable())
    await node._serve_pushes()
    await node._weight_update
    assert left == [True]
    assert [message.kind for message in channel.told] == ["weight_update_ready"]


async def test_a_plan_that_the_end_of_its_round_has_overtaken_begins_nothing(tmp_path):
    class Engine(IdleEngine):
        async def leave_groups(self):
            pass

    plan = PLAN.model_copy(update={"members": [m.WeightUpdateMember(node_id="a", first_rank=1, num_workers=1)]})
    channel = Pushes(m.WeightUpdateAborted(update_id=1, reason="b died"), plan)
    run = RunConfig(id="r", dir=tmp_path, model=tmp_path)
    node = RolloutNode(run, RolloutConfig(engine="fake"), Engine(), channel, WaitTable())
    await node._serve_pushes()
    assert node._weight_update is None
