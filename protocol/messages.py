"""Every message between two processes of a run. Data only; whoever handles one lives elsewhere.

Direction is in the section headings. Fields are only ever added, at the end and with defaults; a change that breaks this
raises ``PROTOCOL_VERSION``, and the golden bytes in ``tests/unit/test_golden_messages.py`` change with it. Arrays never
stand in a field: they travel as frames of their own (``protocol.codec``), and each docstring says which.

The file is long because it holds every message and nothing else: what can be said is read in one place.

Three outcomes are three messages: ``EndOfData`` (there is no more), ``LeaseCancelled`` (not wanted any more),
``LeaseFailed`` (could not be done). An empty queue is none of them: then nothing is sent.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from protocol.verdicts import JudgeResult
from protocol.versions import Segment, VersionTag

PROTOCOL_VERSION = 3


class Message(BaseModel):
    """Base of all messages. ``kind`` is the name on the wire; ``arrays`` lists the frames that must come with it, ``optional_arrays`` those
    that may follow them."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=True)
    kind: ClassVar[str]
    arrays: ClassVar[tuple[str, ...]] = ()
    optional_arrays: ClassVar[tuple[str, ...]] = ()


class WaitInfo(BaseModel):
    """A named wait (the liveness contract, DESIGN section 4). Times are seconds of age, not clock readings: clocks differ."""

    model_config = ConfigDict(frozen=True)

    what: str
    on: str
    age_s: float
    deadline_s: float | None = None  # how long it may take in all
    limit_key: str = ""  # the config key that says so
    onward: bool = False  # see common.waits.Wait


class OpenLease(BaseModel):
    """A lease that a node holds when it says hello again: ``sample_index`` None: of a group to generate; else: to score."""

    model_config = ConfigDict(frozen=True)

    lease_id: str
    group_id: int
    sample_index: int | None = None


# ---- any node <-> coordinator: membership ----------------------------------------------------------------------------


class Hello(Message):
    """First message of a node. ``capacity`` is how many leases it will hold at once: its credits."""

    kind: ClassVar[str] = "hello"

    role: str
    node_id: str
    host: str
    pid: int
    capacity: int = 0
    holds: VersionTag | None = None
    run_uid: str = ""  # from an earlier Welcome; empty on the first contact
    checkpoint_step: int = -1  # learner only: the step its weights are at
    num_workers: int = 0  # rollout only: engine workers that take weights, one rank of a sync group each
    isolation: str = ""  # reward only: what its sandbox is made of
    open_leases: list[OpenLease] = []  # of an earlier session: a coordinator that restarted lets them stand
    settled_tokens: int = (
        -1
    )  # rollout only: generated ones that it knows a coordinator to have counted; -1: it does not say


class Welcome(Message):
    """Answer to ``Hello``: the run goes on at ``tag``; beat every ``heartbeat_interval_s``."""

    kind: ClassVar[str] = "welcome"

    run_uid: str
    tag: VersionTag
    heartbeat_interval_s: float
    node_timeout_s: float


class Refused(Message):
    """The coordinator won't deal with the sender or with its message; ``reason`` is a sentence for people."""

    kind: ClassVar[str] = "refused"

    reason: str
    fatal: bool = True


class Heartbeat(Message):
    """Node is alive: renews its leases, reports its waits and counters, and restates its capacity (0 = draining)."""

    kind: ClassVar[str] = "heartbeat"

    capacity: int
    lease_ids: list[str] = []
    holds: VersionTag | None = None
    waits: list[WaitInfo] = []
    counters: dict[str, float] = {}
    loop_lag_ms: float = 0.0  # the worst since the last beat
    loop_lag_max_ms: float = 0.0  # the worst of this process
    blocked_at: str = ""  # what last held up its event loop, and for how long


class HeartbeatAck(Message):
    """``known`` False: the coordinator does not know this node (it restarted): say ``Hello`` again.

    ``lost_lease_ids`` are leases that the node holds and the coordinator has given to others: stop working on them.
    """

    kind: ClassVar[str] = "heartbeat_ack"

    known: bool = True
    lost_lease_ids: list[str] = []


class Goodbye(Message):
    """The node leaves in order; it holds no lease any more."""

    kind: ClassVar[str] = "goodbye"

    reason: str = ""


class Ack(Message):
    """The request is done, and durable where it had to be. ``accepted`` False: it was late or double, and was dropped."""

    kind: ClassVar[str] = "ack"

    accepted: bool = True
    reason: str = ""


class Shutdown(Message):
    """Coordinator -> node: the run is over; leave."""

    kind: ClassVar[str] = "shutdown"

    reason: str


class ReportRequest(Message):
    """Coordinator -> node: what do you wait for, where are your threads? Answered with ``Report``, whatever the node is doing."""

    kind: ClassVar[str] = "report_request"


class Report(Message):
    """The state of a process for a post-mortem. Array: ``json_utf8`` uint8 [N], as ``common.recorder`` makes it."""

    kind: ClassVar[str] = "report"
    arrays: ClassVar[tuple[str, ...]] = ("json_utf8",)

    pid: int


# ---- coordinator -> rollout and back: generation ---------------------------------------------------------------------


class Sampling(BaseModel):
    """How completions are sampled. Only what the learner can reproduce: softmax of logits / temperature, nothing cut off."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_tokens: int = Field(gt=0)
    temperature: float = Field(default=1.0, gt=0)


class GenerateLease(Message):
    """Sample the completions ``sample_indices`` of one group. Each is sent as soon as it is finished."""

    kind: ClassVar[str] = "generate_lease"

    lease_id: str
    group_id: int
    task_id: str
    prompt: str
    sample_indices: list[int]
    sampling: Sampling
    seed: int  # of the group, the same in each of its leases; for engines that sample each completion from a generator of its own
    timeout_s: float


class SampleResult(Message):
    """One finished completion. Arrays: ``prompt_ids`` int32 [P], ``completion_ids`` int32 [C], ``logprobs`` float32 [C];
    with ``run.routing_replay`` also ``routes`` uint8 or uint16 [P + C - 1, layers, k]: the experts of each token that was computed.

    ``segments`` covers the C tokens in order. ``text`` is for the judge only and is never tokenized again.
    """

    kind: ClassVar[str] = "sample_result"
    arrays: ClassVar[tuple[str, ...]] = ("prompt_ids", "completion_ids", "logprobs")
    optional_arrays: ClassVar[tuple[str, ...]] = ("routes",)

    lease_id: str
    group_id: int
    sample_index: int
    text: str
    finish_reason: str
    segments: list[Segment]


class LeaseFailed(Message):
    """The lease could not be done. ``permanent``: nobody can do it (a prompt too long for the model), don't try again."""

    kind: ClassVar[str] = "lease_failed"

    lease_id: str
    error: str
    permanent: bool = False
    num_tokens: int = 0  # generated for it and thrown away


class CancelLease(Message):
    """Coordinator -> node: stop working on the lease; answer with ``LeaseCancelled``, or with the verdict if it is being made."""

    kind: ClassVar[str] = "cancel_lease"

    lease_id: str
    reason: str


class LeaseCancelled(Message):
    """The node gave the lease back unfinished on purpose (a drain, a ``CancelLease``). Not a failure: no attempt is counted."""

    kind: ClassVar[str] = "lease_cancelled"

    lease_id: str
    reason: str
    num_tokens: int = 0


# ---- coordinator -> reward and back: judging -------------------------------------------------------------------------


class ScoreLease(Message):
    """Judge one completion against one suite, which is named by its content: who lacks it sends a ``SuiteRequest``."""

    kind: ClassVar[str] = "score_lease"

    lease_id: str
    group_id: int
    sample_index: int
    completion: str
    suite_hash: str
    timeout_s: float


class SuiteRequest(Message):
    """Reward: send me the suite of that name. Answered with ``Suite``, or ``Refused`` if no lease of this life named it."""

    kind: ClassVar[str] = "suite_request"

    suite_hash: str


class Suite(Message):
    """One test suite. Array: ``json_utf8`` uint8 [N], the suite's ``to_json``; its ``hash_of`` is ``suite_hash``."""

    kind: ClassVar[str] = "suite"
    arrays: ClassVar[tuple[str, ...]] = ("json_utf8",)

    suite_hash: str


class ScoreResult(Message):
    """The judge's word on one completion. An ``infra_error`` is retried elsewhere by the coordinator."""

    kind: ClassVar[str] = "score_result"

    lease_id: str
    group_id: int
    sample_index: int
    result: JudgeResult


# ---- learner <-> coordinator: batches and steps ----------------------------------------------------------------------


class BatchRequest(Message):
    """Give me the batch of ``step``. Answered when there is one; the same step gets the same batch for ever."""

    kind: ClassVar[str] = "batch_request"

    step: int


class BatchSample(BaseModel):
    """One sample of a batch; its tokens are slices of the batch's arrays, in order."""

    model_config = ConfigDict(frozen=True)

    group_id: int
    sample_index: int
    reward: float
    segments: list[Segment]
    num_prompt_tokens: int
    num_completion_tokens: int
    truncated: bool = False  # it ended at the length limit


class Batch(Message):
    """The fixed batch of one step, groups contiguous. Arrays are concatenations over ``samples``:

    ``prompt_ids`` int32 [sum P], ``completion_ids`` int32 [sum C], ``logprobs`` float32 [sum C]; ``routes`` as in ``SampleResult``, where
    the samples have them.
    """

    kind: ClassVar[str] = "batch"
    arrays: ClassVar[tuple[str, ...]] = ("prompt_ids", "completion_ids", "logprobs")
    optional_arrays: ClassVar[tuple[str, ...]] = ("routes",)

    step: int
    samples: list[BatchSample]
    replay: bool = False  # the step was committed before: train it again
    publish: bool = True  # its version is for the engines; of a replay, only the last one is


class EndOfData(Message):
    """There is no batch for the step and never will be: the run reached its steps or the data its last epoch."""

    kind: ClassVar[str] = "end_of_data"

    reason: str


class Resync(Message):
    """Instead of a batch: some engines hold no valid weights. Publish the current version to them, then ask again."""

    kind: ClassVar[str] = "resync"

    tag: VersionTag


class StepCommitted(Message):
    """The optimizer step is done and its version published. ``metrics`` are finite numbers by their metric name."""

    kind: ClassVar[str] = "step_committed"

    step: int
    metrics: dict[str, float]
    checkpoint_step: int = -1  # newest step that a restart of the learner can resume from
    replay_from: int = -1  # oldest step of a checkpoint that is kept: samples of steps up to it are not asked for again


class LearnerDone(Message):
    """The learner has nothing left to do; ``export_dir`` holds the Hugging Face checkpoint."""

    kind: ClassVar[str] = "learner_done"

    export_dir: str


# ---- learner <-> coordinator <-> rollout: one weight update ----------------------------------------------------------


class SyncRequest(Message):
    """Learner: I want to publish ``tag``. One store address for each sender (pipeline stage), as ``host:port``."""

    kind: ClassVar[str] = "sync_request"

    tag: VersionTag
    stores: list[str]
    only_fenced: bool = False


class SyncMember(BaseModel):
    """A receiver: ``num_workers`` engine workers with consecutive ranks from ``first_rank`` in every sender's group."""

    model_config = ConfigDict(frozen=True)

    node_id: str
    first_rank: int
    num_workers: int


class SyncPlan(Message):
    """Coordinator -> learner and rollout nodes: who takes part. Both sides form (or keep) the groups, then say ``SyncReady``.

    ``group_key`` names the process groups, one in each sender's store: who is in the group of that name keeps it, and others
    form it. In each sender's group the sender is rank 0 and the receivers follow; ``world_size`` counts both.
    """

    kind: ClassVar[str] = "sync_plan"

    sync_id: int
    tag: VersionTag
    stores: list[str]
    members: list[SyncMember]
    world_size: int
    group_key: str
    timeout_s: float


class SyncReady(Message):
    """The sender's groups stand. The answer is ``SyncGo`` when everybody's do, or ``SyncAborted``."""

    kind: ClassVar[str] = "sync_ready"

    sync_id: int


class SyncGo(Message):
    """Everybody is ready: the bytes may flow."""

    kind: ClassVar[str] = "sync_go"

    sync_id: int


class SyncAborted(Message):
    """The update is off: ``reason`` names the node and its error. Old weights go on serving."""

    kind: ClassVar[str] = "sync_aborted"

    sync_id: int
    reason: str


class SyncDone(Message):
    """Rollout: I hold the new version and generate with it. Seconds of the receive, and of the pause it cost."""

    kind: ClassVar[str] = "sync_done"

    sync_id: int
    receive_s: float
    pause_s: float


class SyncFailed(Message):
    """Learner or rollout: my side of the update failed; I am on my old weights."""

    kind: ClassVar[str] = "sync_failed"

    sync_id: int
    error: str


class SyncSent(Message):
    """Learner: all bytes are out. Answered with ``SyncResult`` once every member has reported."""

    kind: ClassVar[str] = "sync_sent"

    sync_id: int
    num_bytes: int
    send_s: float


class SyncResult(Message):
    """Who holds the version now, and who is fenced with which error."""

    kind: ClassVar[str] = "sync_result"

    sync_id: int
    acked: list[str]
    failed: dict[str, str]


# ---- tools -> coordinator --------------------------------------------------------------------------------------------


class StatusRequest(Message):
    """Anyone: how is the run? No ``Hello`` is needed."""

    kind: ClassVar[str] = "status_request"


class StatusReply(Message):
    """The state of the run as JSON text (``services/coordinator/status.py`` builds and documents it)."""

    kind: ClassVar[str] = "status_reply"

    status_json: str


class StopRequest(Message):
    """Anyone: end the run in order. It can be resumed."""

    kind: ClassVar[str] = "stop_request"

    reason: str


class CollectReports(Message):
    """Anyone: have every live process write its report into the run's folder. Acknowledged within seconds, with who did."""

    kind: ClassVar[str] = "collect_reports"


def all_messages() -> dict[str, type[Message]]:
    """Every message class by its kind on the wire."""
    return {cls.kind: cls for cls in Message.__subclasses__()}
