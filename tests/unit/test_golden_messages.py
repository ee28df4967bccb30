"""The bytes of every message are kept: a change that breaks the wire shows here first.

Fields are added at the end with defaults; then the new bytes go into ``golden_messages.json`` with
``python tests/unit/test_golden_messages.py --write``, and the old bytes must still decode.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from protocol import messages as m
from protocol.codec import decode, encode
from protocol.suites import AssertSuite
from protocol.verdicts import JudgeResult, Verdict

GOLDEN = Path(__file__).with_name("golden_messages.json")
TAG = m.VersionTag(version=3, incarnation=1)
SUITE = AssertSuite(kind="asserts", entry_point="f", code="assert f(1) == 2")
RESULT = JudgeResult(verdict=Verdict.ACCEPTED, reward=1.0, parts={"correctness": 1.0}, tests_passed=1, tests_total=1)
SEGMENT = m.Segment(version=3, num_tokens=2)
ARRAYS = {
    "logprobs": np.array([1.5, -2.0], np.float32),
    "json_utf8": np.frombuffer(SUITE.to_json(), np.uint8),
}
ROUTES = np.array([[[1, 2]], [[300, 4]], [[5, 6]]], np.uint16)  # 3 tokens, 1 layer, 2 experts each

EXAMPLES = [
    m.Hello(role="rollout", node_id="n", host="h", pid=1, capacity=4, holds=TAG, num_workers=1),
    m.Welcome(run_uid="u", tag=TAG, heartbeat_interval_s=1.0, node_timeout_s=15.0),
    m.Refused(reason="no"),
    m.Heartbeat(capacity=4, lease_ids=["a-1"], holds=TAG, waits=[m.WaitInfo(what="w", on="o", age_s=1.0)]),
    m.HeartbeatAck(known=False, lost_lease_ids=["a-1"]),
    m.Goodbye(reason="drained"),
    m.Ack(accepted=False, reason="duplicate"),
    m.Shutdown(reason="done"),
    m.GenerateLease(
        lease_id="a-1",
        group_id=1,
        task_id="t",
        prompt="p",
        sample_indices=[0, 1],
        sampling=m.Sampling(max_tokens=8),
        seed=5,
        timeout_s=9.0,
    ),
    m.SampleResult(lease_id="a-1", group_id=1, sample_index=0, text="x", finish_reason="stop", segments=[SEGMENT]),
    m.LeaseFailed(lease_id="a-1", error="e", permanent=True, num_tokens=3),
    m.CancelLease(lease_id="a-1", reason="late"),
    m.LeaseCancelled(lease_id="a-1", reason="drain", num_tokens=3),
    m.ScoreLease(
        lease_id="a-2", group_id=1, sample_index=0, completion="x", suite_hash=SUITE.content_hash, timeout_s=9.0
    ),
    m.SuiteRequest(suite_hash=SUITE.content_hash),
    m.Suite(suite_hash=SUITE.content_hash),
    m.ScoreResult(lease_id="a-2", group_id=1, sample_index=0, result=RESULT),
    m.BatchRequest(step=4),
    m.Batch(
        step=4,
        samples=[
            m.BatchSample(
                group_id=1,
                sample_index=0,
                reward=1.0,
                segments=[SEGMENT],
                num_prompt_tokens=2,
                num_completion_tokens=2,
            )
        ],
    ),
    m.EndOfData(reason="done"),
    m.WeightUpdateNeeded(tag=TAG),
    m.StepCommitted(step=4, metrics={"reward/mean": 0.5}, checkpoint_step=2),
    m.LearnerDone(export_dir="d"),
    m.WeightUpdateRequest(tag=TAG, stores=["h:1"], only_fenced=True),
    m.WeightUpdatePlan(
        update_id=2,
        tag=TAG,
        stores=["h:1"],
        members=[m.WeightUpdateMember(node_id="n", first_rank=1, num_workers=1)],
        world_size=2,
        group_key="n@1",
        timeout_s=9.0,
    ),
    m.WeightUpdateReady(update_id=2),
    m.TransferStart(update_id=2),
    m.WeightUpdateAborted(update_id=2, reason="r"),
    m.WeightsLoaded(update_id=2, receive_s=0.5, pause_s=0.25),
    m.WeightUpdateFailed(update_id=2, error="e"),
    m.TransferDone(update_id=2, num_bytes=10, send_s=0.5),
    m.WeightUpdateResult(update_id=2, acked=["n"], failed={"o": "e"}),
    m.StatusRequest(),
    m.StatusReply(status_json="{}"),
    m.StopRequest(reason="r"),
    m.ReportRequest(),
    m.Report(pid=1),
    m.CollectReports(),
]


# By the kind with " with " and the array that may come with it.
WITH_ROUTES = {
    f"{message.kind} with routed_experts": message
    for message in EXAMPLES
    if message.optional_arrays == ("routed_experts",)
}


def frames_of(message, **optional):
    arrays = {name: ARRAYS.get(name, np.array([1, 2], np.int32)) for name in message.arrays} | optional
    return [bytes(frame).hex() for frame in encode(message, run_id="run", seq=1, re=2, arrays=arrays)]


def examples():
    """Name -> frames, of all that is kept."""
    kept = {message.kind: frames_of(message) for message in EXAMPLES}
    return kept | {name: frames_of(message, routed_experts=ROUTES) for name, message in WITH_ROUTES.items()}


def golden():
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.kind)
def test_the_bytes_of_each_message_are_those_that_were_kept(message):
    assert frames_of(message) == golden()[message.kind]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.kind)
def test_kept_bytes_decode_to_the_message(message):
    assert decode([bytes.fromhex(frame) for frame in golden()[message.kind]]).message == message


@pytest.mark.parametrize("name", WITH_ROUTES)
def test_the_bytes_of_an_optional_array_are_those_that_were_kept(name):
    assert frames_of(WITH_ROUTES[name], routed_experts=ROUTES) == golden()[name]
    received = decode([bytes.fromhex(frame) for frame in golden()[name]])
    assert received.message == WITH_ROUTES[name]
    assert np.array_equal(received.arrays["routed_experts"], ROUTES)


def test_every_message_has_an_example():
    assert {message.kind for message in EXAMPLES} == set(m.all_messages())
    assert set(golden()) == set(examples())


if __name__ == "__main__" and "--write" in sys.argv:
    GOLDEN.write_text(json.dumps(examples(), indent=1) + "\n")
