"""What all messages have in common."""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

PROTOCOL_VERSION = 5


class Message(BaseModel):
    """Base of all messages. ``kind`` is the name on the wire; ``arrays`` lists the frames that must come with it, ``optional_arrays`` those
    that may follow them."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=True)
    kind: ClassVar[str]
    arrays: ClassVar[tuple[str, ...]] = ()
    optional_arrays: ClassVar[tuple[str, ...]] = ()
