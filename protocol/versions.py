"""Policy versions: which weights wrote which tokens, and how old they are when they are trained on."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from common.errors import InvariantError


class VersionTag(BaseModel):
    """Weights of one moment. ``version`` counts optimizer steps; ``incarnation`` counts restarts of the learner.

    Two publications of one version differ in their incarnation: after a restart the learner computes version ``p`` anew,
    and its bits may differ where training isn't deterministic.
    """

    model_config = ConfigDict(frozen=True)

    version: int = Field(ge=0)
    incarnation: int = Field(default=0, ge=0)

    def __str__(self) -> str:
        return f"v{self.version}" if self.incarnation == 0 else f"v{self.version}/{self.incarnation}"


class Segment(BaseModel):
    """A run of ``num_tokens`` consecutive completion tokens that were sampled from policy ``version``."""

    model_config = ConfigDict(frozen=True)

    version: int = Field(ge=0)
    num_tokens: int = Field(ge=0)


def oldest_version(segments: Sequence[Segment]) -> int:
    """The lowest version among ``segments``.

    Raises:
        InvariantError: there is no segment, so nobody can say how old the sample is.
    """
    if not segments:
        raise InvariantError("A sample without version segments: its staleness can't be known.")
    return min(segment.version for segment in segments)


def staleness(segments: Sequence[Segment], learner_version: int) -> int:
    """Optimizer steps between the oldest weights in a sample and the learner that trains on it.

    Raises:
        InvariantError: negative, i.e. the sample claims weights that the learner has not made yet.
    """
    age = learner_version - oldest_version(segments)
    if age < 0:
        raise InvariantError(
            f"A sample carries version {oldest_version(segments)}, but the learner is at {learner_version}: "
            "a negative staleness means that a version counter went backwards."
        )
    return age
