"""Tools -> coordinator: anyone who can connect may ask; no ``Hello`` is needed."""

from __future__ import annotations

from typing import ClassVar

from protocol.messages.base import Message


class StatusRequest(Message):
    """How is the run?"""

    kind: ClassVar[str] = "status_request"


class StatusReply(Message):
    """The state of the run as JSON text (``services/coordinator/status.py`` builds and documents it)."""

    kind: ClassVar[str] = "status_reply"

    status_json: str


class StopRequest(Message):
    """End the run in order. It can be resumed."""

    kind: ClassVar[str] = "stop_request"

    reason: str


class CollectReports(Message):
    """Have every live process write its report into the run's folder. Acknowledged within seconds, with who did."""

    kind: ClassVar[str] = "collect_reports"
