"""CURVE keys: who holds them is in, who doesn't is neither in nor a nuisance; and the file itself is handled with care."""

import asyncio

import pytest

from common.errors import ConfigError, PeerError
from common.waits import WaitTable
from protocol.channel import NodeChannel
from protocol.client import ask
from protocol.config import RunConfig
from protocol.messages import StatusReply, StatusRequest, Welcome
from protocol.router import CoordinatorSocket
from protocol.security import read_keys, write_keys
from protocol.versions import VersionTag
from services.coordinator.config import CoordinatorConfig
from services.coordinator.service import open_coordinator
from tests.faults.processes import free_port


async def answer(socket):
    while True:
        for identity, received in await socket.recv():
            if isinstance(received.message, StatusRequest):
                reply = StatusReply(status_json="{}")
            else:
                reply = Welcome(run_uid="u", tag=VersionTag(version=0), heartbeat_interval_s=5.0, node_timeout_s=15.0)
            socket.send(identity, reply, re=received.seq)


@pytest.fixture
async def run(tmp_path):
    write_keys(tmp_path / "keys")
    keys = read_keys(tmp_path / "keys")
    address = f"tcp://127.0.0.1:{free_port()}"
    socket = CoordinatorSocket(address, "r", keys=keys)
    task = asyncio.create_task(answer(socket))
    yield address, keys
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    socket.close()


async def test_holders_of_the_keys_are_in_and_others_get_no_answer(run, tmp_path):
    address, keys = run
    node = NodeChannel(address, "r", role="reward", node_id="n", waits=WaitTable(), keys=keys)
    assert (await node.start(join_timeout_s=10)).run_uid == "u"
    write_keys(tmp_path / "other")
    for wrong in (None, read_keys(tmp_path / "other")):
        with pytest.raises(PeerError, match="No coordinator answers"):
            await asyncio.to_thread(ask, address, "r", StatusRequest(), timeout_s=0.5, keys=wrong)
    reply = await asyncio.to_thread(ask, address, "r", StatusRequest(), timeout_s=10, keys=keys)
    assert isinstance(reply, StatusReply)
    await node.close()


def test_a_key_file_is_private_and_never_overwritten(tmp_path):
    path = tmp_path / "keys"
    write_keys(path)
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="never overwritten"):
        write_keys(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_keys(path)
    (tmp_path / "junk").write_text("{}")
    (tmp_path / "junk").chmod(0o600)
    with pytest.raises(ConfigError, match="not a key file"):
        read_keys(tmp_path / "junk")
    with pytest.raises(ConfigError, match="forebay keys"):
        read_keys(tmp_path / "missing")


def test_a_coordinator_does_not_listen_to_the_world_without_keys(tmp_path):
    run = RunConfig(id="r", dir=tmp_path, model=tmp_path)
    config = CoordinatorConfig(tasks=tmp_path / "tasks", max_steps=1, bind="tcp://0.0.0.0:1")
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        open_coordinator(run, config)
