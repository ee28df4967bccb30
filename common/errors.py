"""Every error that Forebay raises on purpose, in one tree.

    ForebayError                exit  1   anything below; the message says what, where, and what to do
    |- ConfigError              exit  2   a config, task file, flag or model folder is wrong; nothing was started
    |- PeerError                exit  3   another process could not be reached, or refused us
    |   |- RankLost             exit  1   a rank of the learner ended because another had; the world ends with that one's code
    |   `- NotTakenBack         exit  1   the coordinator doesn't take this process back; one that is started anew may join
    |- ProtocolError            exit  4   a frame or message breaks the protocol
    |- WaitTimeout              exit  5   a named wait passed its deadline
    |- InvariantError           exit  6   the ledger, a version or the journal contradicts itself
    |- TrainingError            exit  7   NaN, engine-trainer mismatch past the alarm: the weights are not to be trusted
    `- GivenUp                  exit  9   nothing but failures comes back: a run that goes on would go nowhere

``forebay judge`` ends with 0 for ``accepted`` and 1 for any other verdict. It, and ``forebay reward --once``, end with 8 where the judge
has no verdict (``infra_error``): of the completion, or of some of the lines.

An exit by SIGINT or SIGTERM after an ordered stop is 130 or 143, as shells have it. A bad *rollout* is never an exception:
it is data (a verdict, a finish reason) and travels in a message.
"""

from __future__ import annotations

EXIT_NOT_JUDGED = 8


class ForebayError(Exception):
    """Base of all expected failures. ``str(error)`` is one paragraph for a person: what, where, what to do."""

    exit_code = 1


class ConfigError(ForebayError):
    """The user's input is wrong: a config key, a task line, a missing folder, a layout that does not divide."""

    exit_code = 2


class PeerError(ForebayError):
    """A peer is not there, went away, or refused this process (other run, other protocol version)."""

    exit_code = 3


class RankLost(PeerError):
    """Another rank of the learner is gone. This one has no reason of its own to end, so its exit code is the one that says least."""

    exit_code = 1


class NotTakenBack(PeerError):
    """The coordinator refuses a process that was in the run before: another has its place, or the run is another one."""

    exit_code = 1


class ProtocolError(ForebayError):
    """Bytes or messages that do not follow the protocol: bad frame, unknown kind, array over the bound."""

    exit_code = 4


class WaitTimeout(ForebayError):
    """A named wait passed its deadline. The message says what for, on whom, since when, and the config key of the limit."""

    exit_code = 5


class InvariantError(ForebayError):
    """State that must never occur: an open ledger, a negative staleness, a journal that contradicts itself."""

    exit_code = 6


class TrainingError(ForebayError):
    """The numbers of a step can't be trusted (NaN, mismatch past the alarm). Raised before the weights change."""

    exit_code = 7


class GivenUp(ForebayError):
    """The run can't go on, and starting it again changes nothing: every task is out, or every group fails. The message has the last cause."""

    exit_code = 9
