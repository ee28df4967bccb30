"""The ``[run]`` section: what all roles of a run must agree on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field, field_validator

from common.config import StrictModel

if TYPE_CHECKING:
    from protocol.security import Keys


MAX_SOCKET_PATH = 107  # bytes: ``sun_path`` of unix(7), without its last one
WILDCARDS = ("0.0.0.0", "*", "[::]", "::")  # all addresses of a machine: fit to listen on, and not to connect to


def check_address(value: str) -> str:
    """``value``, which names a ZeroMQ endpoint.

    Raises:
        ValueError: it can't be one.
    """
    host, _, port = value.removeprefix("tcp://").rpartition(":")
    is_tcp = value.startswith("tcp://") and host != "" and port.isdecimal() and 0 < int(port) < 65536
    if is_tcp:
        return value
    if value.startswith("ipc://") and value != "ipc://":
        if (size := len(os.fsencode(value.removeprefix("ipc://")))) > MAX_SOCKET_PATH:
            raise ValueError(
                f"has a path of {size} bytes, and a unix socket's has {MAX_SOCKET_PATH} at most: choose a shorter one"
            )
        return value
    raise ValueError("must be tcp://HOST:PORT (ports are 1 to 65535) or ipc://PATH")


class RunConfig(StrictModel):
    """One run. Relative paths are relative to the working directory of each process."""

    id: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    dir: Path = Path("runs")  # the run's own folder is dir/id
    model: Path  # Hugging Face checkpoint: weights, config.json, tokenizer with a chat template
    address: str = "tcp://127.0.0.1:5710"  # where nodes reach the coordinator
    # Made by `forebay keys FILE`: encrypts and authenticates all connections to the coordinator.
    key_file: Path | None = None
    seed: int = Field(default=0, ge=0)
    max_prompt_tokens: int = Field(default=512, gt=0)
    max_completion_tokens: int = Field(default=512, gt=0)
    temperature: float = Field(default=1.0, gt=0)
    # Mixture of experts: engines tell which experts they chose, the trainer chooses the same. See services/learner/README.md.
    routing_replay: bool = False
    join_timeout_s: float = Field(default=120.0, gt=0)  # how long a node waits for the coordinator
    weight_update_timeout_s: float = Field(
        default=120.0, gt=0
    )  # one weight update, from the plan to the last acknowledgement
    idle_timeout_s: float = Field(default=7200.0, gt=0)  # a node without work, while the coordinator lives
    # A result on its way to the journal: over join_timeout_s, for the coordinator may restart, and coordinator.disk_timeout_s.
    ack_timeout_s: float = Field(default=900.0, gt=0)
    log_level: str = Field(default="info", pattern="^(debug|info|warning|error)$")

    @field_validator("address")
    @classmethod
    def _an_address(cls, value: str) -> str:
        if value.removeprefix("tcp://").rpartition(":")[0] in WILDCARDS:
            raise ValueError("is where nodes connect to, so it must name a host; what to listen on is coordinator.bind")
        return check_address(value)

    def read_keys(self) -> Keys | None:
        """The run's keys, or None when it has none.

        Raises:
            ConfigError: the key file can't be used.
        """
        from protocol.security import read_keys  # here, so that reading a config needs no ZeroMQ

        return None if self.key_file is None else read_keys(self.key_file)

    @property
    def run_dir(self) -> Path:
        """Folder of the run: journal, logs, checkpoints, export."""
        return self.dir / self.id
