"""Peers without manners at a coordinator's socket, which is in a process of its own: what libzmq can't stand aborts it."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import zmq

from protocol.client import ask
from protocol.codec import encode
from protocol.messages import Ack, StatusRequest

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import asyncio, sys
from protocol.messages import Ack
from protocol.router import CoordinatorSocket

async def main():
    coordinator = CoordinatorSocket(sys.argv[1], "r")
    print("up", flush=True)
    told = asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the test closes it
    while not told.done():
        coming = asyncio.create_task(coordinator.recv())
        await asyncio.wait({coming, told}, return_when=asyncio.FIRST_COMPLETED)
        for identity, received in coming.result() if coming.done() else ():
            coordinator.send(identity, Ack(), re=received.seq)
    coming.cancel()
    coordinator.close()

asyncio.run(main())
"""
# Of a ZMTP 3.1 peer without security (https://rfc.zeromq.org/spec/37/): signature, version, mechanism, no server, filler.
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + b"\0" * 32


def ready(identity, *, socket_type=b"DEALER"):
    """The handshake's second part, as a long command."""
    fields = b"".join(
        bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
        for name, value in ((b"Socket-Type", socket_type), (b"Identity", identity))
    )
    return b"\x06" + (6 + len(fields)).to_bytes(8, "big") + b"\x05READY" + fields


def first_made_up_name():
    """What libzmq's count begins with in a process that leaves its random numbers as they are; see ``protocol.router``."""
    code = """
import zmq
with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
    router.bind("inproc://here")
    dealer.connect("inproc://here")
    dealer.send(b"")
    print(router.recv_multipart()[0].hex())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout, 16)


def test_no_peer_can_abort_a_coordinator_by_the_name_that_it_declares_or_by_what_it_sends_instead_of_zmtp(
    socket_folder,
):
    path = socket_folder / "c"
    address = f"ipc://{path}"
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, address], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with server, zmq.Context() as context, contextlib.ExitStack() as stack:
        assert server.stdout.readline() == "up\n"
        named = []
        for number in range(first := first_made_up_name(), first + 20):
            dealer = stack.enter_context(context.socket(zmq.DEALER))
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.IDENTITY, number.to_bytes(5, "big"))
            dealer.connect(address)
            dealer.send_multipart(encode(StatusRequest(), run_id="r", seq=1))
            named.append(dealer)
        for dealer in named:
            assert dealer.poll(60_000), "the coordinator knows it by its name"
        for _ in range(5):
            assert isinstance(ask(address, "r", StatusRequest(), timeout_s=60), Ack), "it makes up names for these"
        for said in (
            (b"GET / HTTP/1.1\r\n\r\n" * 10,),
            (os.urandom(4000),),
            (b"\xff" * 64,),
            (b"\x01\x00",),
            (GREETING[:40],),
            (GREETING.replace(b"NULL", b"KERBEROS"),),
            (GREETING, ready(b"x" * 255)),
            (GREETING, ready(b"x" * 100_000)),
            (GREETING, ready(b"n", socket_type=b"NONSENSE")),
            (GREETING, b"\x06" + b"\xff" * 8),  # a command of 2^64 - 1 bytes
            (GREETING, ready(b"m"), b"\x02" + b"\xff" * 8),  # a message of as many
            (GREETING, ready(b"l"), b"\x00\x03abc"),  # a message that is none of ours
        ):
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(str(path))
                with contextlib.suppress(ConnectionError):  # libzmq may have had enough before the end
                    for part in said:
                        peer.sendall(part)
                    peer.shutdown(socket.SHUT_WR)
                    while peer.recv(10_000):  # until it has taken all of it in, and closes
                        pass
        assert isinstance(ask(address, "r", StatusRequest(), timeout_s=60), Ack)
        server.stdin.close()
        assert server.wait(60) == 0
