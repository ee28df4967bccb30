"""Encryption and authentication of the control plane: ZeroMQ CURVE with one key file per run (``forebay keys``).

The file has two key pairs: the coordinator's, which nodes know by its public half, and the nodes', the only one that the coordinator
lets in. Whoever can read the file is in the run, so it is written for its owner alone. The weight broadcast (NCCL, gloo) is
not covered: it belongs on a network of its own. https://rfc.zeromq.org/spec/26/ (CurveZMQ), https://rfc.zeromq.org/spec/27/ (ZAP).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import structlog
import zmq
import zmq.asyncio
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from zmq.auth.asyncio import AsyncioAuthenticator

from common.errors import ConfigError

log = structlog.get_logger()

_Key = Field(min_length=40, max_length=40)  # Z85 of 32 bytes


class Keys(BaseModel):
    """Both key pairs of a run, as Z85 text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    server_public: str = _Key
    server_secret: str = _Key
    node_public: str = _Key
    node_secret: str = _Key

    def secure_server(self, socket: zmq.Socket[Any]) -> None:
        """Make a socket, before it binds, one that only holders of the node key can talk to."""
        socket.curve_server = True
        socket.curve_secretkey = self.server_secret.encode()
        socket.curve_publickey = self.server_public.encode()
        socket.zap_domain = b"forebay"

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        """Make a socket, before it connects, one that talks only to the run's coordinator."""
        socket.curve_serverkey = self.server_public.encode()
        socket.curve_publickey = self.node_public.encode()
        socket.curve_secretkey = self.node_secret.encode()

    def authenticator(self, context: zmq.asyncio.Context) -> AsyncioAuthenticator:
        """A running ZAP handler for ``context`` that lets in the node key and logs whom it turns away."""
        authenticator = AsyncioAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback("forebay", credentials_provider=_OnlyNodes(self.node_public))
        return authenticator


class _OnlyNodes:
    def __init__(self, node_public: str) -> None:
        self._node_public = node_public.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        """pyzmq's name for: may the holder of ``key`` (Z85) come in?"""
        if key == self._node_public:
            return True
        log.warning("unknown_key_refused", key=key.decode(errors="replace"))
        return False


def write_keys(path: Path) -> None:
    """New keys in a new file that only its owner can read.

    Raises:
        ConfigError: the file exists (keys are never overwritten) or can't be written.
    """
    server_public, server_secret = zmq.curve_keypair()
    node_public, node_secret = zmq.curve_keypair()
    keys = Keys(
        server_public=server_public.decode(),
        server_secret=server_secret.decode(),
        node_public=node_public.decode(),
        node_secret=node_secret.decode(),
    )
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(keys.model_dump_json(indent=1) + "\n")
    except FileExistsError:
        raise ConfigError(
            f"{path} exists, and keys are never overwritten. Choose another name, or delete it."
        ) from None
    except OSError as error:
        raise ConfigError(f"The key file {path} can't be written: {error.strerror}.") from None


def read_keys(path: Path) -> Keys:
    """
    Raises:
        ConfigError: no such file, not a key file, or one that others can read.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"The key file {path} can be read by others: chmod 600 {path}")
        return Keys.model_validate(json.loads(path.read_text()))
    except OSError as error:
        raise ConfigError(
            f"The key file {path} (run.key_file) can't be read: {error.strerror}. Make one: forebay keys {path}"
        ) from None
    except (ValueError, ValidationError):
        raise ConfigError(f"{path} is not a key file. Make one: forebay keys NEW_FILE") from None
