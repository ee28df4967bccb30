"""One run of a program as the judge sees it: its streams and the channel to it, all made here for that run, and the report at its end."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time

from services.reward.sandbox import values
from services.reward.sandbox.control import SILENCE_S, Ended, Order, Report, WorkerDied, read_report

_QUIET_S = 0.004  # at first only the end of a run is waited for: most are over before their output needs room
_PIPE_BYTES = 65536


class Guest:
    """One run of a program: its streams, frames to and from it, and at the end the report.

    ``stdin`` is all of its input. Of each output at most ``cap_bytes`` are kept; one byte more and it is stopped. ``merge``: both outputs in
    one. ``program``: descriptor of a compiled program, or -1; it stays the caller's.

    Raises:
        WorkerDied: the worker is gone.
    """

    def __init__(
        self, control: socket.socket, order: Order, *, stdin: bytes, cap_bytes: int, merge: bool, program: int
    ) -> None:
        self.stdout, self.stderr = bytearray(), bytearray()
        self.overflow = False
        self.report: Report | None = None
        self._control, self._cap = control, cap_bytes
        self._inbox, self._outbox, self._input = bytearray(), b"", memoryview(stdin)
        self._deadline = time.monotonic() + 10 * order.limits.wall_limit_s + SILENCE_S
        self._killed = False
        self._channel, theirs = socket.socketpair()
        self._channel.setblocking(False)
        out_r, out_w = os.pipe2(os.O_CLOEXEC)
        err_r, err_w = (out_r, out_w) if merge else os.pipe2(os.O_CLOEXEC)
        if stdin:
            in_r, self._stdin = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(self._stdin, False)
        else:
            in_r, self._stdin = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), -1
        self._outputs = {out_r: self.stdout} | ({} if merge else {err_r: self.stderr})
        given = [in_r, out_w, err_w, theirs.fileno()] + ([program] if program >= 0 else [])
        try:
            socket.send_fds(control, [order.line()], given)
        except OSError as error:
            self.close()
            raise WorkerDied(f"The sandbox worker is gone: {error.strerror}.") from None
        finally:
            theirs.close()
            for descriptor in {in_r, out_w, err_w}:
                os.close(descriptor)
        for descriptor in self._outputs:
            os.set_blocking(descriptor, False)
        self._watched: dict[int, int] = {}
        self._poll = select.poll()
        self._watch(control.fileno(), select.POLLIN)
        self._write_input()

    # ---- for judges ----

    def send(self, *bodies: bytes) -> None:
        """Frames out, as far as they go without waiting; ``receive`` and ``wait`` send the rest."""
        self._outbox += b"".join(len(body).to_bytes(4, "big") + body for body in bodies)
        self._write_channel()

    def settle(self) -> None:
        """Give the guest a moment to end by itself before anything is read from it: each look costs more than what it may find."""
        if not self._outbox and self._stdin < 0 and self.report is None:
            self._step(_QUIET_S)

    def receive(self) -> bytes:
        """The next frame's body.

        Raises:
            Ended: the guest ended or was stopped before it.
            WorkerDied, values.ValueRefused: the worker is gone; the frame is longer than allowed.
        """
        self._watch_outputs()
        self._watch(self._channel.fileno(), select.POLLIN | (select.POLLOUT if self._outbox else 0))
        while (body := self._frame()) is None:
            if self.report is not None or self._channel.fileno() not in self._watched:
                raise Ended
            self._step(None)
        return body

    def exchange(self, body: bytes) -> bytes:
        """``send``, then ``receive``."""
        self.send(body)
        return self.receive()

    def wait(self) -> Report:
        """The report, when the guest has ended by itself or by a limit.

        Raises:
            WorkerDied: the worker is gone.
        """
        self.settle()
        if self.report is None:
            self._watch_outputs()
            self._watch(self._channel.fileno(), select.POLLIN | (select.POLLOUT if self._outbox else 0))
            if self._stdin >= 0:
                self._watch(self._stdin, select.POLLOUT)
        while self.report is None:
            self._step(None)
        return self.report

    def frames(self) -> list[bytes]:
        """All whole frames that came and were not received; after the end."""
        found = []
        while (body := self._frame()) is not None:
            found.append(body)
        return found

    def finish(self) -> Report:
        """Stop the guest if it runs; the report. The worker is free for the next run afterwards.

        Raises:
            WorkerDied: no report came.
        """
        try:
            self._kill()
            while self.report is None:
                self._step(None)
            return self.report
        finally:
            self.close()

    def close(self) -> None:
        """Give the descriptors back. Safe to call twice."""
        self._channel.close()
        for descriptor in [*self._outputs, self._stdin]:
            if descriptor >= 0:
                os.close(descriptor)
        self._outputs, self._stdin = {}, -1

    # ---- streams ----

    def _watch(self, descriptor: int, events: int) -> None:
        if self._watched.get(descriptor) != events:
            self._poll.register(descriptor, events)
            self._watched[descriptor] = events

    def _unwatch(self, descriptor: int) -> None:
        if self._watched.pop(descriptor, None) is not None:
            self._poll.unregister(descriptor)

    def _watch_outputs(self) -> None:
        for descriptor in self._outputs:
            self._watch(descriptor, select.POLLIN)

    def _step(self, timeout_s: float | None) -> None:
        """Wait for something to happen, and do what it asks for."""
        left_s = self._deadline - time.monotonic()
        events = dict(self._poll.poll(1000 * (left_s if timeout_s is None else timeout_s) if left_s > 0 else 0))
        if not events and timeout_s is None:
            raise WorkerDied("The sandbox worker does not answer.")
        for descriptor in list(self._outputs):
            if descriptor in events:
                self._read_output(descriptor)
        channel = self._channel.fileno()
        if state := events.get(channel, 0):
            if state & select.POLLOUT:
                self._write_channel()
            if state & (select.POLLIN | select.POLLHUP | select.POLLERR):
                self._read_channel()
        if self._stdin in events:
            self._write_input()
        if self._control.fileno() in events:
            self.report = read_report(self._control)
            for descriptor in list(self._outputs):
                self._read_output(descriptor)
            self._read_channel()

    def _read_output(self, descriptor: int) -> None:
        """Until it would block, is at its end, or is too much."""
        kept = self._outputs[descriptor]
        while True:
            try:
                data = os.read(descriptor, _PIPE_BYTES)
            except BlockingIOError:
                return
            if not data:
                self._unwatch(descriptor)
                os.close(descriptor)
                del self._outputs[descriptor]
                return
            kept += data
            if len(kept) > self._cap:
                del kept[self._cap :]
                self.overflow = True
                self._kill()
                if self.report is None:
                    return

    def _read_channel(self) -> None:
        while len(self._inbox) <= values.MAX_FRAME_BYTES:
            try:
                data = self._channel.recv(_PIPE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._unwatch(self._channel.fileno())
                return
            self._inbox += data
            if len(data) < _PIPE_BYTES and self.report is None:
                return

    def _write_channel(self) -> None:
        try:
            self._outbox = self._outbox[self._channel.send(self._outbox) :]
        except BlockingIOError:
            pass
        except OSError:  # a gone reader: its end is reported by the worker
            self._outbox = b""
        if not self._outbox and self._channel.fileno() in self._watched:
            self._watch(self._channel.fileno(), select.POLLIN)

    def _write_input(self) -> None:
        try:
            while self._input:
                self._input = self._input[os.write(self._stdin, self._input[:_PIPE_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # it ended without reading all of it, as a program may
            self._input = memoryview(b"")
        if self._stdin >= 0:
            self._unwatch(self._stdin)
            os.close(self._stdin)
            self._stdin = -1

    def _frame(self) -> bytes | None:
        if len(self._inbox) < 4:
            return None
        size = values.frame_size(bytes(self._inbox[:4]))
        if len(self._inbox) < 4 + size:
            return None
        body = bytes(self._inbox[4 : 4 + size])
        del self._inbox[: 4 + size]
        return body

    def _kill(self) -> None:
        if self.report is None and not self._killed:
            self._killed = True
            with contextlib.suppress(OSError):  # a worker that is gone shows when its report is read
                self._control.send(b"kill")


def parts(*items: bytes) -> bytes:
    """A list of byte strings as ``guest.parts`` reads it."""
    return b"".join(len(item).to_bytes(4, "big") + item for item in items)


def python_program(code: str, artifact: bytes = b"", *, keep: bool = False) -> bytes:
    """The frame that a guest compiles its Python program from, or finds it compiled in: ``artifact``, a code object that an earlier run of
    the same code gave back when it was asked to ``keep`` it."""
    if artifact:
        return parts(b"code", artifact, b"")
    return parts(b"source", code.encode("utf-8", "surrogatepass"), b"keep" if keep else b"")
