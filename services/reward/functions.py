"""A candidate's functions in a process of their own, which answers calls of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from services.reward.sandbox import values
from services.reward.sandbox.control import Ended, Report
from services.reward.sandbox.streams import Guest, python_program


class Functions:
    """``guest`` loads ``code`` and answers. ``compile_error`` and ``raised`` say what loading came to; ``finish`` ends a guest and reports.

    When all calls are known beforehand they are sent along with the code and the process ends after the last; then most runs are over
    before anything of them has to be read here.
    """

    def __init__(
        self,
        guest: Guest,
        finish: Callable[[], Report],
        code: str,
        *,
        artifact: bytes,
        keep: bool,
        calls: Sequence[bytes] | None,
    ) -> None:
        self.guest, self._finish = guest, finish
        self.report: Report | None = None
        self.compile_error: str | None = None
        self.raised: str | None = None
        self.artifact = artifact
        self.compiled = bool(artifact)
        self._sent_ahead = calls is not None
        self.loaded = False
        source = python_program(code, artifact, keep=keep)
        try:
            if calls is None:
                self.guest.send(source)
            else:
                self.guest.send(source, *calls, b"")
                self.guest.settle()
            self._load(artifact)
        except Ended:
            pass
        except values.ValueRefused as error:  # it wrote to the channel itself
            self.raised = f"The program's answer can't be read: {error}"
        except BaseException:
            self.finish()
            raise

    def _load(self, artifact: bytes) -> None:
        if not artifact:
            said = self.guest.receive()
            if said[:1] == b"e":
                self.compile_error = said[1:].decode("utf-8", "replace")
                return
            self.compiled, self.artifact = True, said[1:]
        reply = values.unpack(self.guest.receive())
        if reply == ["loaded"]:
            self.loaded = True
        elif isinstance(reply, list) and len(reply) == 3 and isinstance(reply[1], str) and isinstance(reply[2], str):
            self.raised = f"{reply[1][:80]}: {reply[2][:300]}"
        else:
            raise values.ValueRefused("Not a reply.")

    def call(self, frame: bytes) -> bytes:
        """One call, encoded; the encoded reply.

        Raises:
            Ended: the process ended or was stopped before it answered.
        """
        return self.guest.exchange(frame)

    def answer(self, frame: bytes) -> bytes:
        """The encoded reply to the next call, which is sent now unless all were sent before. Raises as ``call`` does."""
        return self.reply() if self._sent_ahead else self.call(frame)

    def reply(self) -> bytes:
        """The encoded reply to the next of ``calls``. Raises as ``call`` does."""
        return self.guest.receive()

    def finish(self) -> Report:
        """End the process."""
        if self.report is None:
            self.report = self._finish()
        return self.report
