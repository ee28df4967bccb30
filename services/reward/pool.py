"""Judges side by side: a bounded queue of completions in, futures of results out. Thread-safe.

    submit --> queue --> threads, one a judge process --> extract, look up, send, wait --> future
                            (judge_process.py, which owns the sandboxes)

A thread takes a completion, extracts the code, and looks for the same code under the same suite: among the verdicts that are kept, then
among those being made, which it joins. What is left goes to its judge. A judge's own failure is tried again up to ``MAX_ATTEMPTS``
times, by whichever judge is free first.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from multiprocessing.connection import Connection
from typing import Any

import structlog
from pydantic import TypeAdapter

from common.errors import ConfigError
from protocol.suites import TestSuite
from protocol.verdicts import JudgeResult, Verdict
from services.reward.config import RewardConfig
from services.reward.judge import MAX_ATTEMPTS, extract
from services.reward.judge_process import RecentlyUsed
from services.reward.lab import LEVELS
from services.reward.sandbox.control import Level

log = structlog.get_logger()
_START_S = 120.0
_STOP_S = 5.0
_PATIENCE_S = 300.0  # on top of ten times what the suites may take by their limits: then a judge counts as hung
_BATCH = 4  # completions that a judge is given at once when many wait
_RESULTS: TypeAdapter[list[JudgeResult]] = TypeAdapter(list[JudgeResult])


@dataclass
class _Job:
    completion: str
    suite: TestSuite
    future: Future[JudgeResult] = field(default_factory=Future)
    submitted_s: float = field(default_factory=time.monotonic)
    attempt: int = 1
    code: str = ""
    key: bytes = b""


class JudgePool:
    """``config.num_workers`` judgements at a time. ``levels`` are the isolation levels to try, strongest first."""

    def __init__(self, config: RewardConfig, *, levels: tuple[Level, ...] = LEVELS) -> None:
        self._config, self._levels = config, levels
        self._queue: queue.Queue[_Job | None] = queue.Queue(config.max_queue)
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, JudgeResult] = OrderedDict()
        self._flights: dict[bytes, list[_Job]] = {}
        self._counts: Counter[str] = Counter()
        self._threads: list[_Server] = []
        self._closed = False
        self.isolation = "none"

    def start(self) -> None:
        """Start the judges; each starts a sandbox and tests it.

        Raises:
            ConfigError: no isolation works on this node (and ``unsafe`` is off), or the interpreter does not run.
        """
        self._threads = [_Server(self, index) for index in range(self._config.num_workers)]
        for thread in self._threads:
            thread.start()
        try:
            levels = [thread.started.result() for thread in self._threads]
            self.isolation = min(levels, key=len)  # the weakest: each layer is a part of the name
        except Exception:
            self.close()
            raise

    def submit(self, completion: str, suite: TestSuite) -> Future[JudgeResult]:
        """Judge ``completion``; the future never fails: a judge's own failure is the verdict ``infra_error``.

        Raises:
            queue.Full: ``config.max_queue`` completions are waiting already.
        """
        job = _Job(completion, suite)
        if self._closed:
            job.future.set_result(_closed())
        else:
            self._queue.put_nowait(job)
        return job.future

    def judge(self, completion: str, suite: TestSuite) -> JudgeResult:
        """``submit``, and wait."""
        return self.submit(completion, suite).result()

    def close(self) -> None:
        """End all judges; what waits or runs ends as an infra error. Safe to call twice."""
        self._closed = True
        for thread in self._threads:
            thread.stop()
        while True:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                break
            if job is not None:
                self._finish(job, _closed())
        for _ in self._threads:
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(2 * _STOP_S)

    def counters(self) -> dict[str, float]:
        """Since the start: ``judged`` (by a judge), ``cache_hits`` (kept, or joined to the same code), ``retries``, ``infra_errors``;
        and ``queued`` now."""
        with self._lock:
            counts = {name: float(self._counts[name]) for name in ("judged", "cache_hits", "retries", "infra_errors")}
        return {**counts, "queued": float(self._queue.qsize())}

    # ---- for the threads ----

    def _take_batch(self) -> list[_Job]:
        """The next completions that need a judge, more than one if many wait; none: stop."""
        job = self._take(wait=True)
        batch = [job] if job else []
        while batch and len(batch) < min(_BATCH, self._queue.qsize() // (2 * len(self._threads))):
            job = self._take(wait=False)
            if job is None:
                break
            batch.append(job)
        return batch

    def _take(self, *, wait: bool) -> _Job | None:
        """The next completion that needs a judge; ``None``: the pool is closed, or nothing is there to ``wait`` for."""
        while True:
            try:
                job = self._queue.get(block=wait)
            except queue.Empty:
                return None
            if job is None and not wait:
                self._queue.put(None)  # for when this thread waits
            if job is None or job.key:
                return job
            if not job.future.set_running_or_notify_cancel():
                continue
            try:
                code = extract(job.completion, job.suite, self._config)
            except Exception as error:  # a bug here must end one completion, not the thread that others wait for
                log.exception("extraction_failed")
                code = JudgeResult(
                    verdict=Verdict.INFRA_ERROR, message=f"The judge failed: {type(error).__name__}: {error}"
                )
            if isinstance(code, JudgeResult):
                self._finish(job, code.model_copy(update={"isolation": self.isolation}))
                continue
            job.code = code
            job.key = blake2b(
                code.encode("utf-8", "surrogatepass") + job.suite.content_hash.encode(), digest_size=16
            ).digest()
            if self._is_new(job):
                return job

    def _is_new(self, job: _Job) -> bool:
        """Whether nobody has judged this code, or is about to."""
        with self._lock:
            kept = self._kept.get(job.key)
            if kept is not None:
                self._kept.move_to_end(job.key)
            elif (flight := self._flights.get(job.key)) is not None:
                flight.append(job)
            else:
                self._flights[job.key] = [job]
                return True
            self._counts["cache_hits"] += 1
        if kept is not None:
            self._finish(job, kept)
        return False

    def _done(self, job: _Job, result: JudgeResult, queue_s: float) -> None:
        """A judge's word on a job: try again, or answer all that wait for it."""
        failed = result.verdict is Verdict.INFRA_ERROR
        if failed and not result.repeatable and job.attempt < MAX_ATTEMPTS and not self._closed:
            log.warning("judgement_retried", attempt=job.attempt, reason=result.message)
            job.attempt += 1
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(job)
                self._counts["retries"] += 1
                return
        result = result.model_copy(update={"attempt": result.attempt + job.attempt - 1, "queue_s": queue_s})
        with self._lock:
            self._counts["judged"] += 1
            self._counts["infra_errors"] += failed
            if result.repeatable and not failed and self._config.cache_size:
                self._kept[job.key] = result
                if len(self._kept) > self._config.cache_size:
                    self._kept.popitem(last=False)
            waiting = self._flights.pop(job.key, [job])
        for each in waiting:
            self._finish(each, result)

    @staticmethod
    def _finish(job: _Job, result: JudgeResult) -> None:
        with contextlib.suppress(Exception):  # it was cancelled: nobody waits
            job.future.set_result(result)


class _Server(threading.Thread):
    """Drives one judge process. It starts that process itself: the kernel ties a child's life to the thread that made it."""

    def __init__(self, pool: JudgePool, index: int) -> None:
        super().__init__(name=f"judge-{index}", daemon=True)
        self._pool = pool
        self.started: Future[str] = Future()
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Connection | None = None
        self._known: RecentlyUsed[bool] = RecentlyUsed()

    def stop(self) -> None:
        """End the judge process, from another thread; this one then ends what it was waiting for as an infra error."""
        if self._process is not None:
            self._process.kill()

    def run(self) -> None:
        """Jobs until the pool is closed."""
        try:
            self.started.set_result(self._start())
        except Exception as error:  # whatever it is, ``JudgePool.start`` waits for it
            self.started.set_exception(error)
            return
        while batch := self._pool._take_batch():
            self._judge(batch)
        self._end()

    def _judge(self, batch: list[_Job]) -> None:
        """Have a batch judged; what the process does not answer is an infra error."""
        started_s = time.monotonic()
        left = list(batch)

        def done(result: JudgeResult) -> None:
            job = left.pop(0)
            self._pool._done(job, result, started_s - job.submitted_s)

        try:
            if self._link is None and not self._pool._closed:
                self._start()
            if not self._pool._closed:
                self._ask(batch, done)
        except Exception as error:  # also an answer that can't be read: this thread has to stay, others wait for it
            self._end()
            why = f"The judge process went away ({type(error).__name__}: {error})."
            while left and not self._pool._closed:
                done(JudgeResult(verdict=Verdict.INFRA_ERROR, message=why))
        while left:
            done(_closed())

    def _ask(self, batch: list[_Job], done: Callable[[JudgeResult], None]) -> None:
        assert self._link is not None
        requests, patience_s = [], _PATIENCE_S
        for job in batch:
            name = job.suite.content_hash
            definition = None if self._known.get(name) else job.suite.to_json().decode()
            if definition is not None:
                self._known.put(name, True, len(definition))
            requests.append({"code": job.code, "suite": name, "definition": definition})
            patience_s += _longest_s(job.suite)
        self._link.send_bytes(json.dumps(requests).encode())
        answered = 0
        while answered < len(batch):
            if not self._link.poll(patience_s):
                raise OSError("it is silent beyond all limits")
            for result in _RESULTS.validate_json(self._link.recv_bytes()):
                answered += 1
                done(result)

    def _start(self) -> str:
        """A judge process; its isolation level. Raises ``ConfigError``."""
        mine, theirs = socket.socketpair()
        config = self._pool._config.model_dump_json()
        command = [
            sys.executable,
            "-m",
            "services.reward.judge_process",
            str(theirs.fileno()),
            config,
            ",".join(self._pool._levels),
        ]
        with theirs:
            # A session of its own: a Ctrl-C at the terminal is for the pool, which ends this one in order.
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True
            )
        self._link = Connection(mine.detach())
        self._known = RecentlyUsed()
        answer: dict[str, Any] = {"error": f"A judge process did not start within {_START_S:.0f} s."}
        with contextlib.suppress(EOFError, OSError):
            if self._link.poll(_START_S):
                answer = json.loads(self._link.recv_bytes())
        if "error" in answer or self._pool._closed:
            self._end()
            raise ConfigError(answer.get("error", "The judge is closed."))
        isolation: str = answer["isolation"]
        return isolation

    def _end(self) -> None:
        """End the judge process; it ends its sandboxes when its socket closes, and they themselves when it is killed."""
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._process is not None:
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _closed() -> JudgeResult:
    return JudgeResult(verdict=Verdict.INFRA_ERROR, message="The judge is closed.")


def _longest_s(suite: TestSuite) -> float:
    """More than a judgement takes by its limits, on a very busy machine."""
    tests = len(getattr(suite, "cases", ())) or getattr(suite, "num_cases", 1)
    return 10 * tests * suite.limits.wall_limit_s
