"""Leases: which work waits, who gets it, and what becomes of the results. Part of the coordinator, and like it without I/O.

A generate lease is one group (the samples of it that are missing), a score lease one sample. Work that a node has failed on goes
to another while there is one. Every end of a lease comes through here: results, failures, cancellations, deadlines, deaths.
Completions of one group with the same text are judged once (``twins.py``). A score lease names its suite, which a node asks for once.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

import numpy as np
import structlog

from protocol import messages as m
from protocol.codec import Received
from protocol.config import RunConfig
from protocol.suites import TestSuite
from protocol.tasks import Task
from protocol.verdicts import Verdict
from services.coordinator.config import CoordinatorConfig
from services.coordinator.groups import Group, Sample, sample_problem
from services.coordinator.membership import Lease, Members, Node, Reply, is_current
from services.coordinator.pool import Pool
from services.coordinator.twins import Twins

log = structlog.get_logger()


class LeaseDesk:
    """See the module. ``reply`` puts a message into the coordinator's outbox; ``on_progress`` is called when the run moved on."""

    def __init__(
        self,
        run: RunConfig,
        config: CoordinatorConfig,
        tasks: list[Task],
        *,
        pool: Pool,
        members: Members,
        reply: Reply,
        on_progress: Callable[[], None],
    ) -> None:
        self._run, self._config, self._tasks = run, config, tasks
        self._pool, self._members, self._reply, self._on_progress = pool, members, reply, on_progress
        self.verdicts: Counter[str] = Counter()
        self.num_copied = 0  # verdicts that came from a twin
        self._twins = Twins()
        self._suites: dict[str, TestSuite] = {}  # by name: those that a lease has named
        self._to_generate = dict.fromkeys(g.group_id for g in pool.groups.values() if g.missing(config.group_size))
        self._to_score = deque((group.group_id, sample.sample_index) for group, sample in pool.unjudged())

    def add(self, groups: list[Group]) -> None:
        """Newly admitted groups, to be generated."""
        self._to_generate.update(dict.fromkeys(group.group_id for group in groups))

    def expire(self, now: float) -> None:
        """End the leases that are past their deadline."""
        for lease in self._members.expired(now):
            self._members.end_lease(lease.lease_id)
            kind = "generate" if lease.sample_index is None else "score"
            error = f"not done within coordinator.{kind}_timeout_s on {lease.node_id}"
            log.warning("lease_expired", group=lease.group_id, sample=lease.sample_index, node=lease.node_id)
            if node := self._members.nodes.get(lease.node_id):
                self._reply(node.identity, m.CancelLease(lease_id=lease.lease_id, reason=error))
            self.give_back([lease], error=error)

    # ---- results ----

    def on_sample(self, node: Node, message: m.SampleResult, received: Received) -> None:
        """A completion: acknowledged when it is in the journal."""
        if self._pool.has_sample(message.group_id, message.sample_index, received.arrays):
            self._end_if_complete(message)
            return self._reply(node.identity, m.Ack(), received.seq)
        num_tokens = int(received.arrays["completion_ids"].size)
        node.delivered_tokens += num_tokens
        if reason := sample_problem(message, received.arrays):
            self._pool.count_thrown_away(num_tokens)
            log.warning("sample_refused", node=node.node_id, group=message.group_id, reason=reason)
            if lease := self._members.end_lease(message.lease_id):
                self.give_back([lease], error=reason)
            return self._reply(node.identity, m.Ack(accepted=False, reason=reason), received.seq)
        accepted = self._pool.add_sample(
            message.group_id,
            message.sample_index,
            text=message.text,
            finish_reason=message.finish_reason,
            segments=message.segments,
            arrays={name: array.copy() for name, array in received.arrays.items()},  # don't pin the frame
        )
        if accepted:
            self._on_progress()
            self._to_score.append((message.group_id, message.sample_index))
        self._end_if_complete(message)
        return self._reply(
            node.identity, m.Ack(accepted=accepted, reason="" if accepted else "duplicate"), received.seq
        )

    def _end_if_complete(self, message: m.SampleResult) -> None:
        """The lease, too, of a node whose samples came second."""
        group = self._pool.groups.get(message.group_id)
        if group is None or not group.missing(self._config.group_size):
            self._members.end_lease(message.lease_id)

    def on_score(self, node: Node, message: m.ScoreResult, received: Received) -> None:
        """A verdict, or the judge's failure to give one."""
        lease = self._members.end_lease(message.lease_id)
        if lease is not None:
            self.verdicts[message.result.verdict] += 1
        if lease is not None or message.result.reward is not None:  # a late failure was counted when its lease ended
            self._score(message.group_id, message.sample_index, message.result, node.node_id)
        if lease is not None:
            self._release_twins(lease)
        self._reply(node.identity, m.Ack(), received.seq)

    def on_suite_request(self, node: Node, message: m.SuiteRequest, received: Received) -> None:
        """A reward node has a lease of a suite that it lacks."""
        suite = self._suites.get(message.suite_hash)
        if suite is None:
            reason = f"No lease since this coordinator started names a suite {message.suite_hash[:64]!r}."
            return self._reply(node.identity, m.Refused(reason=reason, fatal=False), received.seq)
        data = {"json_utf8": np.frombuffer(suite.to_json(), dtype=np.uint8)}
        return self._reply(node.identity, m.Suite(suite_hash=message.suite_hash), received.seq, data)

    def _score(self, group_id: int, sample_index: int, result: m.JudgeResult, node_id: str) -> None:
        if self._pool.add_result(group_id, sample_index, result, node_id=node_id):
            self._to_score.append((group_id, sample_index))
        else:
            self._on_progress()

    def _copy_verdict(self, group: Group, sample: Sample) -> bool:
        """Give ``sample`` the verdict of a judged sibling with the same text, if there is one."""
        for twin in group.samples.values():
            if twin.result is not None and twin.text == sample.text:
                self.verdicts[twin.result.verdict] += 1
                self.num_copied += 1
                self._score(group.group_id, sample.sample_index, twin.result, "")
                return True
        return False

    def _release_twins(self, lease: Lease) -> None:
        """A score lease is over: those that were held for its result take it, or are judged after all."""
        assert lease.sample_index is not None
        for sample_index in reversed(self._twins.end(lease.lease_id)):
            group = self._pool.groups.get(lease.group_id)
            if group is not None and not self._copy_verdict(group, group.samples[sample_index]):
                self._to_score.appendleft((lease.group_id, sample_index))

    def on_lease_failed(self, node: Node, message: m.LeaseFailed, received: Received) -> None:
        """The node could not do it."""
        node.delivered_tokens += message.num_tokens
        self._pool.count_thrown_away(message.num_tokens)
        if lease := self._members.end_lease(message.lease_id):
            log.warning(
                "lease_failed",
                node=node.node_id,
                group=lease.group_id,
                error=message.error,
                permanent=message.permanent,
            )
            self.give_back([lease], error=message.error, permanent=message.permanent)
        self._reply(node.identity, m.Ack(), received.seq)

    def on_lease_cancelled(self, node: Node, message: m.LeaseCancelled, received: Received) -> None:
        """The node gave it back; no attempt is counted."""
        node.delivered_tokens += message.num_tokens
        self._pool.count_thrown_away(message.num_tokens)
        if lease := self._members.end_lease(message.lease_id):
            self.give_back([lease], error=message.reason, counted=False)
        self._reply(node.identity, m.Ack(), received.seq)

    # ---- giving out ----

    def dispatch(self) -> None:
        """Give waiting work to nodes with room."""
        now = time.monotonic()
        rollouts = [n for n in self._members.of_role("rollout") if is_current(n, self._pool.version)]
        for group_id in list(self._to_generate):
            if not any(node.free > 0 for node in rollouts):
                break
            if self._lease_generate(rollouts, group_id, now):
                del self._to_generate[group_id]
        rewards = self._members.of_role("reward")
        held: list[tuple[int, int]] = []
        while self._to_score and any(node.free > 0 for node in rewards):
            group_id, sample_index = self._to_score.popleft()
            if not self._lease_score(rewards, group_id, sample_index, now):
                held.append((group_id, sample_index))
        self._to_score.extendleft(reversed(held))

    def _lease_generate(self, nodes: list[Node], group_id: int, now: float) -> bool:
        """False: the nodes that have not failed on the group are all busy. One that fails at once is always free."""
        group = self._pool.groups.get(group_id)
        missing = group.missing(self._config.group_size) if group else []
        if group is None or not missing:
            return True
        node = _freest(nodes, group.avoid_nodes)
        if node.free <= 0:
            return False
        task = self._tasks[group.task_index]
        lease = self._members.grant(node, group_id, None, now + self._config.generate_timeout_s)
        message = m.GenerateLease(
            lease_id=lease.lease_id,
            group_id=group_id,
            task_id=task.task_id,
            prompt=task.prompt,
            sample_indices=missing,
            sampling=m.Sampling(max_tokens=self._run.max_completion_tokens, temperature=self._run.temperature),
            seed=(self._run.seed * 1_000_003 + group_id * 1009) % 2**31,
            timeout_s=self._config.generate_timeout_s,
        )
        self._reply(node.identity, message)
        return True

    def _lease_score(self, nodes: list[Node], group_id: int, sample_index: int, now: float) -> bool:
        """False: the nodes that have not failed on the sample are all busy."""
        group = self._pool.groups.get(group_id)
        sample = group.samples.get(sample_index) if group else None
        if group is None or sample is None or sample.result is not None or sample.lost:
            return True
        if self._copy_verdict(group, sample) or self._twins.hold(group_id, sample.text, sample_index):
            return True
        node = _freest(nodes, sample.avoid_nodes)
        if node.free <= 0:
            return False
        lease = self._members.grant(node, group_id, sample_index, now + self._config.score_timeout_s)
        self._twins.begin(lease.lease_id, group_id, sample.text)
        suite = self._tasks[group.task_index].tests
        self._suites[suite.content_hash] = suite
        message = m.ScoreLease(
            lease_id=lease.lease_id,
            group_id=group_id,
            sample_index=sample_index,
            completion=sample.text,
            suite_hash=suite.content_hash,
            timeout_s=self._config.score_timeout_s,
        )
        self._reply(node.identity, message)
        return True

    def give_back(self, leases: list[Lease], *, error: str = "", permanent: bool = False, counted: bool = True) -> None:
        """Unfinished leases: queue their work again, unless it has failed too often."""
        for lease in leases:
            if lease.sample_index is None:
                if self._pool.generation_failed(
                    lease.group_id, error, permanent=permanent, counted=counted, node_id=lease.node_id
                ):
                    self._to_generate = {lease.group_id: None, **self._to_generate}  # it is older than what waits
                continue
            if not counted:
                self._to_score.appendleft((lease.group_id, lease.sample_index))
            else:
                result = m.JudgeResult(verdict=Verdict.INFRA_ERROR, message=error)
                self._score(lease.group_id, lease.sample_index, result, lease.node_id)
            self._release_twins(lease)


def _freest(nodes: list[Node], avoid: set[str]) -> Node:
    """The node with the most room, of those that are not to be avoided if there are any."""
    return max([node for node in nodes if node.node_id not in avoid] or nodes, key=lambda node: node.free)
