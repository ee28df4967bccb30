"""Judges side by side: a bounded queue of completions in, futures of results out. Thread-safe."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from protocol.suites import TestSuite
from protocol.verdicts import JudgeResult
from services.reward.config import RewardConfig
from services.reward.judge import Judge


class JudgePool:
    """``config.num_workers`` judgements at a time."""

    def __init__(self, config: RewardConfig) -> None:
        self._judge = Judge(config)
        self._threads = ThreadPoolExecutor(config.num_workers, thread_name_prefix="judge")
        self.isolation = "none"

    def start(self) -> None:
        """Start the workers and judge one known program.

        Raises:
            ConfigError: no isolation works on this node (and ``unsafe`` is off), or the interpreter does not run.
        """
        self._judge.start()
        self.isolation = self._judge.isolation

    def submit(self, completion: str, suite: TestSuite) -> Future[JudgeResult]:
        """Judge ``completion``; the future never fails: a judge's own failure is the verdict ``infra_error``."""
        return self._threads.submit(self._judge.judge, completion, suite)

    def judge(self, completion: str, suite: TestSuite) -> JudgeResult:
        """``submit``, and wait."""
        return self.submit(completion, suite).result()

    def close(self) -> None:
        """End all workers; what waits or runs ends as an infra error. Safe to call twice."""
        self._judge.close()
        self._threads.shutdown(wait=True, cancel_futures=True)
