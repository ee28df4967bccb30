"""Ask a coordinator one question from outside the run: for tools, not for nodes."""

from __future__ import annotations

import zmq

from common.errors import PeerError
from protocol.codec import decode, encode
from protocol.messages import Message, Refused
from protocol.security import Keys


def ask(address: str, run_id: str, message: Message, *, timeout_s: float, keys: Keys | None = None) -> Message:
    """The coordinator's answer. Blocks; needs no event loop and no ``Hello``. An empty ``run_id`` fits any run.

    Raises:
        PeerError: no answer within ``timeout_s``, or the coordinator refuses.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            keys.secure_client(socket)
        socket.connect(address)
        socket.send_multipart(encode(message, run_id=run_id, seq=1))
        if not socket.poll(int(timeout_s * 1000)):
            raise PeerError(
                f"No coordinator answers at {address} within {timeout_s:g} s. Is the run up? Its address is run.address in the config, "
                "and if it has keys, run.key_file must name the same file here."
            )
        answer = decode(socket.recv_multipart()).message
    if isinstance(answer, Refused):
        raise PeerError(f"The coordinator at {address} refused: {answer.reason}")
    return answer
