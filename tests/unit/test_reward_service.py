"""A reward node against a coordinator in the same loop: suites by name, drains, and judges that fail. The pool is a fake one."""

import asyncio
import contextlib
from concurrent.futures import Future

import numpy as np
import pytest

from common.errors import PeerError
from common.waits import WaitTable
from protocol import messages as m
from protocol.channel import NodeChannel
from protocol.config import RunConfig
from protocol.router import CoordinatorSocket
from protocol.suites import AssertSuite, CallSuite
from protocol.verdicts import JudgeResult, TestResult, Verdict
from services.reward.config import RewardConfig
from services.reward.service import MAX_RESULT_BYTES, RewardNode, fit_to_send
from services.reward.suite_store import SuiteStore
from tests.polling import until

SUITES = [AssertSuite(entry_point="f", code=f"assert f({n}) == {n}") for n in range(4)]
RIGHT = JudgeResult(verdict=Verdict.ACCEPTED, reward=1.0)


class Pool:
    """Answers when told to; ``broken`` completions make ``submit`` raise."""

    isolation = "pretended"

    def __init__(self):
        self.jobs = []

    def submit(self, completion, suite):
        if completion == "broken":
            raise OSError("no such worker")
        self.jobs.append((completion, suite, Future()))
        if completion != "slow":
            self.jobs[-1][2].set_result(RIGHT)
        return self.jobs[-1][2]

    def counters(self):
        return {"cache_hits": 3.0}


class Coordinator:
    """Gives out leases and suites, and keeps what it was told."""

    def __init__(self, address):
        self.socket = CoordinatorSocket(address, "r")
        self.suites = {suite.content_hash: suite.to_json() for suite in SUITES}
        self.results, self.cancelled = {}, []
        self.requests, self.beats, self.goodbyes, self.hellos = [], [], [], []
        self.task = asyncio.create_task(self.serve())

    async def serve(self):
        while True:
            for identity, received in await self.socket.recv():
                self.answer(identity, received)

    def answer(self, identity, received):
        answer, arrays = m.Ack(), None
        match received.message:
            case m.Hello() as hello:
                self.identity = identity
                self.hellos.append(hello)
                tag = m.VersionTag(version=0)
                answer = m.Welcome(run_uid="u", tag=tag, heartbeat_interval_s=0.05, node_timeout_s=5)
            case m.Heartbeat() as beat:
                self.beats.append(beat)
                answer = m.HeartbeatAck()
            case m.Goodbye() as goodbye:
                self.goodbyes.append(goodbye)
            case m.ScoreResult() as result:
                self.results[result.lease_id] = result.result
            case m.LeaseCancelled() as cancelled:
                self.cancelled.append(cancelled.lease_id)
            case m.SuiteRequest(suite_hash=name):
                self.requests.append(name)
                answer = m.Refused(reason="unknown suite", fatal=False)
                if name in self.suites:
                    answer, arrays = m.Suite(suite_hash=name), {"json_utf8": np.frombuffer(self.suites[name], np.uint8)}
        self.socket.send(identity, answer, re=received.seq, arrays=arrays)

    async def lease(self, lease_id, completion="x", suite_hash=SUITES[0].content_hash):
        message = m.ScoreLease(
            lease_id=lease_id, group_id=1, sample_index=0, completion=completion, suite_hash=suite_hash, timeout_s=5
        )
        self.socket.send(self.identity, message)


class Stop:
    """``StopSignal`` without signals."""

    def __init__(self):
        self.event = asyncio.Event()

    async def interrupts(self, work):
        task, stopped = asyncio.create_task(work), asyncio.create_task(self.event.wait())
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        for each in (task, stopped):
            each.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)
        return self.event.is_set()


@contextlib.asynccontextmanager
async def started(socket_folder, **config):
    coordinator = Coordinator(f"ipc://{socket_folder}/c")
    channel = NodeChannel(f"ipc://{socket_folder}/c", "r", role="reward", node_id="n", waits=WaitTable())
    run = RunConfig(id="r", dir=socket_folder, model=socket_folder)
    node = RewardNode(run, RewardConfig(workers=2, **config), Pool(), channel, channel.waits)
    stop = Stop()
    await channel.start(join_timeout_s=20)
    serving = asyncio.create_task(node.serve(stop))
    try:
        yield coordinator, node, stop, serving
    finally:
        stop.event.set()
        await serving
        await channel.close("drained")
        coordinator.task.cancel()
        await asyncio.gather(coordinator.task, return_exceptions=True)
        coordinator.socket.close()


async def test_leases_of_one_suite_make_one_request_and_all_get_a_verdict(socket_folder):
    async with started(socket_folder) as (coordinator, node, _, _):
        for number in range(8):
            await coordinator.lease(f"l{number}")
        await until(lambda: len(coordinator.results) == 8)
        assert coordinator.requests == [SUITES[0].content_hash]
        assert {suite.content_hash for _, suite, _ in node.pool.jobs} == {SUITES[0].content_hash}
        assert coordinator.hellos[0].isolation == "pretended"
        assert coordinator.hellos[0].capacity == 4
        await until(lambda: coordinator.beats[-1].counters.get("judged") == 8)
        assert coordinator.beats[-1].counters["cache_hits"] == 3


async def test_what_can_not_be_judged_is_an_infra_error_and_its_neighbours_are_judged(socket_folder):
    async with started(socket_folder) as (coordinator, _, _, _):
        lying = SUITES[1].content_hash
        coordinator.suites[lying] = SUITES[2].to_json()
        await coordinator.lease("unknown", suite_hash="beef")
        await coordinator.lease("lie", suite_hash=lying)
        await coordinator.lease("broken", completion="broken")
        await coordinator.lease("fine")
        await until(lambda: len(coordinator.results) == 4)
        assert coordinator.results["fine"] == RIGHT
        words = {"unknown": "unknown suite", "lie": "another suite", "broken": "no such worker"}
        for lease_id, text in words.items():
            result = coordinator.results[lease_id]
            assert (result.verdict, result.reward) == (Verdict.INFRA_ERROR, None)
            assert text in result.message
        await until(lambda: coordinator.beats[-1].counters.get("infra_errors") == 3)
        coordinator.suites[lying] = SUITES[1].to_json()
        await coordinator.lease("again", suite_hash=lying)
        await until(lambda: "again" in coordinator.results)
        assert coordinator.results["again"] == RIGHT, "a failure is not kept"


async def test_a_node_that_is_told_to_stop_takes_nothing_new_and_finishes_what_it_has(socket_folder):
    async with started(socket_folder, drain_timeout_s=20) as (coordinator, node, stop, serving):
        await coordinator.lease("l0", completion="slow")
        await until(lambda: node.pool.jobs)
        stop.event.set()
        await until(lambda: coordinator.beats[-1].capacity == 0)
        assert not serving.done()
        node.pool.jobs[0][2].set_result(RIGHT)
        await serving
        assert coordinator.results == {"l0": RIGHT}


async def test_what_is_not_finished_in_time_is_left_to_others_without_a_verdict(socket_folder):
    async with started(socket_folder, drain_timeout_s=0.1) as (coordinator, node, stop, serving):
        await coordinator.lease("l0", completion="slow")
        await until(lambda: node.pool.jobs)
        stop.event.set()
        await serving
        assert coordinator.results == {}
        assert not node.pool.jobs[0][2].cancelled(), "the pool's own bookkeeping is left alone"
        node.pool.jobs[0][2].set_result(RIGHT)


async def test_a_judgement_that_is_not_wanted_any_more_is_given_back_if_no_judge_has_it(socket_folder):
    async with started(socket_folder) as (coordinator, node, _, _):
        await coordinator.lease("waiting", completion="slow")
        await coordinator.lease("begun", completion="slow")
        await until(lambda: len(node.pool.jobs) == 2)
        waiting, begun = (job[2] for job in node.pool.jobs)
        begun.set_running_or_notify_cancel()
        for lease_id in ("waiting", "begun", "unknown"):
            coordinator.socket.send(
                coordinator.identity, m.CancelLease(lease_id=lease_id, reason="group 1 is given up")
            )
        await until(lambda: coordinator.cancelled)
        assert coordinator.cancelled == ["waiting"]
        assert waiting.cancelled()
        begun.set_result(RIGHT)
        await until(lambda: coordinator.results)
        assert coordinator.results == {"begun": RIGHT}


# ---- the store ----


class Source:
    """Counts requests, answers when ``gate`` is open."""

    def __init__(self):
        self.requests, self.gate = [], asyncio.Event()
        self.gate.set()

    async def fetch(self, name):
        self.requests.append(name)
        await self.gate.wait()
        for suite in SUITES:
            if suite.content_hash == name:
                return suite.to_json()
        raise PeerError("unknown suite")


async def test_a_lease_that_is_given_up_leaves_the_request_to_the_others():
    source = Source()
    store = SuiteStore(source.fetch)
    source.gate.clear()
    first, second = (asyncio.create_task(store.get(SUITES[0].content_hash)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    source.gate.set()
    assert await second == SUITES[0]
    assert len(source.requests) == 1


async def test_the_suites_that_were_not_used_for_longest_go_first():
    source = Source()
    size = len(SUITES[0].to_json())
    store = SuiteStore(source.fetch, max_bytes=2 * size)
    for number in (0, 1, 0, 2, 0, 1):
        await store.get(SUITES[number].content_hash)
    assert source.requests == [SUITES[number].content_hash for number in (0, 1, 2, 1)]


async def test_a_suite_that_is_bigger_than_the_store_is_kept_until_the_next():
    source = Source()
    store = SuiteStore(source.fetch, max_bytes=1)
    for number in (0, 0, 1, 0):
        assert await store.get(SUITES[number].content_hash) == SUITES[number]
    assert len(source.requests) == 3


async def test_a_refusal_reaches_all_who_wait_and_is_not_kept():
    source = Source()
    store = SuiteStore(source.fetch)
    for _ in range(2):
        answers = await asyncio.gather(*(store.get("beef") for _ in range(3)), return_exceptions=True)
        assert [str(answer) for answer in answers] == ["unknown suite"] * 3
    assert len(source.requests) == 2


# ---- results that travel ----


def test_a_result_that_is_too_big_for_the_journal_goes_without_its_tests():
    tests = tuple(TestResult(verdict=Verdict.ACCEPTED, score=1, message="x" * 200) for _ in range(1000))
    result = RIGHT.model_copy(update={"tests": tests})
    sent = fit_to_send(result)
    assert len(sent.model_dump_json()) < MAX_RESULT_BYTES
    assert sent == RIGHT
    assert fit_to_send(RIGHT.model_copy(update={"tests": tests[:5]})).tests == tests[:5]


def test_text_that_is_none_does_not_keep_a_result_from_travelling():
    sent = fit_to_send(JudgeResult(verdict=Verdict.RUNTIME_ERROR, reward=0.0, message="bad \ud800 text"))
    assert (sent.verdict, sent.message) == (Verdict.RUNTIME_ERROR, "bad ? text")


# ---- suites that do not travel ----


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "cases.1.args: NaN and infinities"),
        (float("-inf"), "cases.1.args: NaN and infinities"),
        ("\ud800", "cases.1.args: a lone surrogate"),
    ],
)
def test_a_suite_with_a_value_that_json_lacks_says_where(value, words):
    suite = CallSuite(entry_point="f", cases=[{"args": [1], "expected": 1}, {"args": [[value]], "expected": 1}])
    with pytest.raises(ValueError, match=words):
        suite.to_json()


def test_a_suite_that_is_too_big_says_how_big(monkeypatch):
    monkeypatch.setattr("protocol.suites.MAX_SUITE_BYTES", 1 << 20)
    with pytest.raises(ValueError, match=r"2 MiB of JSON, and at most 1 MiB travel"):
        AssertSuite(entry_point="f", code="#" * (2 << 20)).to_json()
