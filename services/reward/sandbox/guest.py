"""What runs inside the sandbox's forked processes: the server of the candidate's functions, and the runner of tests.

Loaded by path in a worker; standard library only. Nothing here is trusted on the candidate's side: the candidate shares its process
with ``serve_candidate`` and can answer a call with any bytes. It never holds an expected value, so that is all it can do.
"""

from __future__ import annotations

import os
import socket
import sys
import types
from typing import Any

import forebay_values as values  # the worker registers values.py under this name


class Channel:
    """Blocking frames over the one socket of a guest."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def read(self) -> bytes:
        """The next frame's body. The other side going away ends this process."""
        return self._exactly(values.frame_size(self._exactly(4)))

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._sock.recv(count - len(parts))
            if not part:
                os._exit(0)
            parts += part
        return bytes(parts)

    def write(self, message: Any) -> None:
        """Send one frame."""
        self._sock.sendall(values.pack(message))


def serve_candidate(channel: Channel) -> None:
    """Compile, load, then answer calls until killed."""
    code = values.unpack(channel.read())
    try:
        compiled = compile(code, "<candidate>", "exec", dont_inherit=True)
    except BaseException as error:  # whatever the compiler says is the verdict
        channel.write(["compile_error", *values.describe(error)])
        return
    channel.write(["compiled"])
    channel.read()
    module = types.ModuleType("solution")  # not __main__: a guard must not run for call tests
    sys.modules["solution"] = module
    try:
        exec(compiled, module.__dict__)  # this is what a sandbox is for
    except BaseException as error:  # SystemExit too; the tests did not pass, whatever it was
        channel.write(["raised", *values.describe(error)])
        return
    channel.write(["loaded"])
    handles: list[Any] = []
    encoder = values.Encoder(handles)
    decoder = values.Decoder(lambda number, _name: handles[number])
    while True:
        channel.write(_answer(values.unpack(channel.read()), module.__dict__, handles, encoder, decoder))


def _answer(call: Any, scope: dict[str, Any], handles: list[Any], encoder: Any, decoder: Any) -> Any:
    _, target, args_tree, kwargs_tree, want_args = call
    try:
        if isinstance(target, list):
            function = getattr(handles[target[0]], target[1])
        elif target in scope:
            function = scope[target]
        else:
            raise NameError(f"name {target!r} is not defined")
        args = decoder.decode(args_tree)
        result = function(*args, **decoder.decode(kwargs_tree))
        tree = encoder.encode(result)
        reply = ["value", tree, _changed(args, args_tree, encoder) if want_args else None]
        values.pack(reply)
        return reply
    except BaseException as error:  # SystemExit and the like fail the test; the judge decides
        return ["raised", *values.describe(error)]


def _changed(args: Any, before: Any, encoder: Any) -> Any:
    try:
        after = encoder.encode(args)
    except values.ValueRefused:
        return None
    return None if after == before else after


# --- the tests' process: no candidate code here ---


class _TestError(Exception):
    """The tests ask for something the border can't carry: the suite's fault, not the candidate's."""


class Remote:
    """A function of the candidate, or a method of an object there, as the tests see it."""

    def __init__(self, channel: Channel, target: Any) -> None:
        self._channel = channel
        self._target = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            frame = ["call", self._target, values.Encoder().encode(args), values.Encoder().encode(kwargs), True]
        except values.ValueRefused as error:
            raise _TestError(str(error)) from None
        self._channel.write(frame)
        try:
            value, changed = values.read_reply(self._channel.read(), values.Decoder(self._handle))
        except values.CandidateRaised as raised:
            error = _as_builtin(raised)
            error.forebay_raised = str(raised)  # type: ignore[attr-defined]
            raise error from None
        if changed is not None:
            for mine, theirs in zip(args, changed, strict=False):
                _copy_back(mine, theirs)
        return value

    def _handle(self, number: int, type_name: str) -> Any:
        return RemoteObject(self._channel, number, type_name)


class RemoteObject(values.Opaque):
    """An object that stays with the candidate; only its methods can be called."""

    def __init__(self, channel: Channel, number: int, type_name: str) -> None:
        super().__init__(number, type_name)
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Remote(self._channel, [self.number, name])


def _as_builtin(raised: Any) -> BaseException:
    try:
        error: BaseException = raised.builtin(str(raised))
    except TypeError:  # UnicodeDecodeError and the like want more arguments
        error = ValueError(str(raised)) if issubclass(raised.builtin, ValueError) else Exception(str(raised))
    return error if isinstance(error, Exception) else RuntimeError(str(raised))


def _copy_back(mine: Any, theirs: Any) -> None:
    if type(mine) is not type(theirs):
        return
    if isinstance(mine, list | bytearray):
        mine[:] = theirs
    elif isinstance(mine, dict | set):
        mine.clear()
        mine.update(theirs)


def run_tests(channel: Channel) -> None:
    """Run the instrumented tests; send ``["call", ...]``, ``["test", kind, text]`` and at last ``["done", kind, text]``."""
    job = values.unpack(channel.read())
    remotes = {name: Remote(channel, name) for name in job["names"]}
    scope: dict[str, Any] = {
        "__name__": "tests",
        **remotes,
        "__forebay_ok__": lambda: channel.write(["test", "ok", ""]),
        "__forebay_fail__": lambda error: channel.write(["test", *_kind(error)]),
    }
    try:
        exec(compile(job["source"], "<tests>", "exec"), scope)  # the tests, in a sandbox of their own
        if job["kind"] == "check":
            scope["check"](remotes[job["entry_point"]])
    except BaseException as error:  # classified and reported; the judge decides
        channel.write(["done", *_kind(error)])
    else:
        channel.write(["done", "ok", ""])


def _kind(error: BaseException) -> tuple[str, str]:
    raised = getattr(error, "forebay_raised", None)
    if raised is not None:
        return "raised", raised
    if isinstance(error, values.ValueRefused):
        return "refused", str(error)
    if isinstance(error, _TestError | NameError | ImportError | MemoryError | RecursionError):
        return "suite", f"{type(error).__name__}: {error}"[:300]
    return "wrong", "" if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"[:300]
