"""The two sockets of a run, both ends in one event loop over a real transport."""

import asyncio
import contextlib
import socket
import subprocess
import sys

import msgpack
import pytest
import zmq
import zmq.asyncio

from common.errors import ConfigError, NotTakenBack, PeerError
from common.net import is_loopback, listens_on_loopback, outgoing_ports
from common.waits import WaitTable
from protocol import messages as m
from protocol.channel import NodeChannel
from protocol.codec import decode, encode, peek, seal
from protocol.router import CoordinatorSocket
from tests.faults.processes import free_port
from tests.polling import until

TAG = m.VersionTag(version=0)


class Coordinator:
    """The least that a node needs: it welcomes, acknowledges samples' leases, and knows only who said hello to it."""

    def __init__(self, address, *, mute=False):
        self.socket = CoordinatorSocket(address, "r")
        self.mute = mute
        self.hellos, self.commits, self.known, self.refusal = [], [], set(), ""
        self.task = asyncio.create_task(self.serve())

    async def serve(self):
        while True:
            for identity, received in await self.socket.recv():
                self.answer(identity, received)

    def answer(self, identity, received):
        match received.message:
            case m.Hello() if self.refusal:
                self.socket.send(identity, m.Refused(reason=self.refusal), re=received.seq)
            case m.Hello() as hello:
                self.hellos.append(hello)
                if not self.mute:
                    self.known.add(identity)
                    welcome = m.Welcome(run_uid="u", tag=TAG, heartbeat_interval_s=0.05, node_timeout_s=0.3)
                    self.socket.send(identity, welcome, re=received.seq)
            case m.Heartbeat() if not self.mute:
                ack = m.HeartbeatAck(known=identity in self.known)
                self.socket.send(identity, ack, re=received.seq)
            case m.StepCommitted() as commit if identity in self.known:
                self.commits.append(commit.step)
                if not self.mute:
                    self.socket.send(identity, m.Ack(), re=received.seq)

    async def close(self):
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.socket.close()


@contextlib.asynccontextmanager
async def node_at(address, run_id="r"):
    channel = NodeChannel(address, run_id, role="learner", node_id="n", waits=WaitTable())
    try:
        yield channel
    finally:
        await channel.close("over")


@pytest.fixture
def address(socket_folder):
    return f"ipc://{socket_folder}/c"


def commit(step):
    return m.StepCommitted(step=step, metrics={})


async def test_a_request_gets_its_answer(address):
    coordinator = Coordinator(address)
    async with node_at(address) as node:
        welcome = await node.start(join_timeout_s=20)
        assert welcome.run_uid == "u"
        answers = await asyncio.gather(*(node.request(commit(step)) for step in range(20)))
        assert {type(answer.message) for answer in answers} == {m.Ack}
        assert sorted(coordinator.commits) == list(range(20))
    await coordinator.close()


async def test_what_the_coordinator_sends_unasked_comes_as_a_push(address):
    coordinator = Coordinator(address)
    async with node_at(address) as node:
        await node.start(join_timeout_s=20)
        coordinator.socket.send(next(iter(coordinator.known)), m.Shutdown(reason="over"))
        while not isinstance((push := await node.pushes.get()).message, m.Shutdown):
            assert isinstance(push.message, m.HeartbeatAck)
    await coordinator.close()


async def test_a_node_of_another_run_is_refused_with_both_names(address):
    coordinator = Coordinator(address)
    async with node_at(address, run_id="other") as node:
        with pytest.raises(PeerError, match=r"serves run 'r'; the message is of run 'other'"):
            await node.start(join_timeout_s=20)
    assert coordinator.hellos == []
    await coordinator.close()


async def test_a_node_that_is_not_taken_back_says_why_with_a_code_that_has_it_started_anew(address):
    coordinator = Coordinator(address)
    async with node_at(address) as node:
        await node.start(join_timeout_s=20)
        coordinator.refusal = "Another has its place."
        coordinator.known.clear()
        async with asyncio.timeout(20):
            with pytest.raises(NotTakenBack, match="Another has its place") as caught:
                await node.failed
    assert caught.value.exit_code == 1
    await coordinator.close()


async def test_a_node_of_another_protocol_version_is_refused(address, monkeypatch):
    coordinator = Coordinator(address)
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.connect(address)
        hello = m.Hello(role="reward", node_id="n", host="h", pid=1)
        frames = encode(hello, run_id="r", seq=1)
        header = peek(frames[0]) | {"protocol": 99}
        await raw.send_multipart(seal(msgpack.packb(header), []))
        refused = decode(await raw.recv_multipart()).message
        assert isinstance(refused, m.Refused)
        assert "version 99" in refused.reason
        assert refused.fatal
    await coordinator.close()


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"\x00"], [b"\xc1" * 1000], [b"", b"", b""], [msgpack.packb({"protocol": 1, "kind": "hello"})] * 40],
)
async def test_garbage_is_refused_and_the_coordinator_goes_on(address, frames):
    coordinator = Coordinator(address)
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.connect(address)
        await raw.send_multipart(frames)
        refused = decode(await raw.recv_multipart()).message
        assert isinstance(refused, m.Refused)
        assert not refused.fatal, "a message may be damaged on its way, and is sent again"
    async with node_at(address) as node:
        await node.start(join_timeout_s=20)
    await coordinator.close()


async def test_a_message_to_a_peer_that_is_gone_is_no_error(address):
    coordinator = Coordinator(address)
    assert not coordinator.socket.send(b"nobody", m.Shutdown(reason="over"))
    await coordinator.close()


async def test_open_requests_are_sent_again_when_the_coordinator_has_restarted(address):
    first = Coordinator(address)
    async with node_at(address) as node:
        await node.start(join_timeout_s=20)
        first.mute = True
        open_request = asyncio.create_task(node.request(commit(7)))
        await until(lambda: 7 in first.commits)
        await first.close()
        second = Coordinator(address)
        assert isinstance((await open_request).message, m.Ack)
        assert second.hellos[0].run_uid == "u", "it says that it was here before"
        assert set(second.commits) == {7}
        await second.close()


async def test_an_answer_that_was_lost_is_asked_for_again(address):
    coordinator = Coordinator(address)
    async with node_at(address) as node:
        await node.start(join_timeout_s=20)
        coordinator.mute = True
        open_request = asyncio.create_task(node.request(commit(7)))
        await until(lambda: 7 in coordinator.commits)
        coordinator.mute = False
        assert isinstance((await open_request).message, m.Ack)
        assert set(coordinator.commits) == {7}
    await coordinator.close()


async def test_a_hello_that_dies_with_a_coordinator_is_said_again(address, monkeypatch):
    monkeypatch.setattr("protocol.channel.HELLO_AGAIN_S", 0.2)
    first = Coordinator(address, mute=True)
    async with node_at(address) as node:
        joining = asyncio.create_task(node.start(join_timeout_s=20))
        await until(lambda: first.hellos)
        await first.close()
        second = Coordinator(address)
        await joining
        await second.close()


async def test_a_node_without_a_coordinator_says_where_it_looked_and_for_how_long(address):
    async with node_at(address) as node:
        with pytest.raises(PeerError, match=rf"{address} for 1 s.*run.address.*run.join_timeout_s"):
            await node.start(join_timeout_s=1)


async def test_a_coordinator_that_stays_away_fails_the_node_and_its_open_requests(address):
    coordinator = Coordinator(address)
    async with node_at(address) as node:
        await node.start(join_timeout_s=1)
        coordinator.mute = True
        with pytest.raises(PeerError, match="silent for 1 s"):
            await node.request(commit(7))
        with pytest.raises(PeerError, match="silent for 1 s"):
            await node.failed
    await coordinator.close()


async def test_a_port_in_use_is_an_error_with_the_address_and_the_remedy():
    first = CoordinatorSocket("tcp://127.0.0.1:*", "r")
    taken = first._socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
    with pytest.raises(ConfigError, match=rf"{taken}.*in use.*for outgoing ones.*--set run.address"):
        CoordinatorSocket(taken, "r")
    first.close()
    with socket.create_server(("127.0.0.1", free_port())) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}: Address already in use. If another run"):
            CoordinatorSocket(f"tcp://127.0.0.1:{port}", "r")


def test_a_free_port_is_given_out_once_and_to_no_connection():
    ports = {free_port() for _ in range(50)}
    code = "from tests.faults.processes import free_port; print(*(free_port() for _ in range(50)))"
    ports |= set(map(int, subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.split()))
    assert len(ports) == 100
    assert not ports & set(outgoing_ports())


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("tcp://127.0.0.1:1", True),
        ("tcp://127.1.2.3:1", True),
        ("tcp://localhost:1", True),
        ("tcp://[::1]:1", True),
        ("tcp://[0:0:0:0:0:0:0:1]:1", True),
        ("tcp://[::ffff:127.0.0.1]:1", True),
        ("ipc:///tmp/x", True),
        ("tcp://10.0.0.1:1", False),
        ("tcp://*:1", False),
        ("tcp://0.0.0.0:1", False),
        ("tcp://[::]:1", False),
        ("tcp://127.example.org:1", False),
    ],
)
def test_loopback_is_told_from_the_rest(address, expected):
    assert is_loopback(address) is expected
    if not address.endswith("example.org:1"):  # nothing is looked up
        assert listens_on_loopback(address) is expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [(["127.0.1.1"], True), (["::1", "127.0.0.1"], True), (["127.0.0.1", "10.0.0.1"], False), (None, False)],
)
def test_a_name_to_listen_on_is_looked_up_and_one_to_connect_to_is_not(found, expected, monkeypatch):
    def look_up(host, port):
        assert host == "node7"
        if found is None:
            raise socket.gaierror("no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0)) for ip in found]

    monkeypatch.setattr("common.net.socket.getaddrinfo", look_up)
    assert listens_on_loopback("tcp://node7:1") is expected
    assert not is_loopback("tcp://node7:1")
