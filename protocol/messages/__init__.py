"""Every message between two processes of a run. Data only; whoever handles one lives elsewhere.

    from protocol import messages as m

One module for each subject; its docstring says the direction. Fields are only ever added, at the end and with defaults; a change that
breaks this raises ``PROTOCOL_VERSION``, and the golden bytes in ``tests/unit/test_golden_messages.py`` change with it. Arrays never
stand in a field: they travel as frames of their own (``protocol.codec``), and each docstring says which.

Three outcomes are three messages: ``EndOfData`` (there is no more), ``LeaseCancelled`` (not wanted any more),
``LeaseFailed`` (could not be done). An empty queue is none of them: then nothing is sent.
"""

from __future__ import annotations

from protocol.messages.base import PROTOCOL_VERSION, Message
from protocol.messages.leases import (
    CancelLease,
    GenerateLease,
    LeaseCancelled,
    LeaseFailed,
    SampleResult,
    Sampling,
    ScoreLease,
    ScoreResult,
    Suite,
    SuiteRequest,
)
from protocol.messages.membership import (
    Ack,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Hello,
    OpenLease,
    Refused,
    Report,
    ReportRequest,
    Shutdown,
    WaitInfo,
    Welcome,
)
from protocol.messages.tools import (
    CollectReports,
    StatusReply,
    StatusRequest,
    StopRequest,
)
from protocol.messages.training import (
    Batch,
    BatchRequest,
    BatchSample,
    EndOfData,
    LearnerDone,
    StepCommitted,
    WeightUpdateNeeded,
)
from protocol.messages.weight_updates import (
    TransferDone,
    TransferStart,
    WeightsLoaded,
    WeightUpdateAborted,
    WeightUpdateFailed,
    WeightUpdateMember,
    WeightUpdatePlan,
    WeightUpdateReady,
    WeightUpdateRequest,
    WeightUpdateResult,
)
from protocol.verdicts import JudgeResult
from protocol.versions import Segment, VersionTag

__all__ = [
    "PROTOCOL_VERSION",
    "Ack",
    "Batch",
    "BatchRequest",
    "BatchSample",
    "CancelLease",
    "CollectReports",
    "EndOfData",
    "GenerateLease",
    "Goodbye",
    "Heartbeat",
    "HeartbeatAck",
    "Hello",
    "JudgeResult",
    "LearnerDone",
    "LeaseCancelled",
    "LeaseFailed",
    "Message",
    "OpenLease",
    "Refused",
    "Report",
    "ReportRequest",
    "SampleResult",
    "Sampling",
    "ScoreLease",
    "ScoreResult",
    "Segment",
    "Shutdown",
    "StatusReply",
    "StatusRequest",
    "StepCommitted",
    "StopRequest",
    "Suite",
    "SuiteRequest",
    "TransferDone",
    "TransferStart",
    "VersionTag",
    "WaitInfo",
    "WeightUpdateAborted",
    "WeightUpdateFailed",
    "WeightUpdateMember",
    "WeightUpdateNeeded",
    "WeightUpdatePlan",
    "WeightUpdateReady",
    "WeightUpdateRequest",
    "WeightUpdateResult",
    "WeightsLoaded",
    "Welcome",
    "all_messages",
]


def all_messages() -> dict[str, type[Message]]:
    """Every message class by its kind on the wire."""
    return {cls.kind: cls for cls in Message.__subclasses__()}
