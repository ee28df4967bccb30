"""Leases: which work waits, who gets it, and what becomes of the results. Part of the coordinator, and like it without I/O.

A generate lease is one group (the samples of it that are missing), a score lease one sample. Work that a node has failed on goes
to another while there is one. Every end of a lease comes through here: results, failures, cancellations, deadlines, deaths.
Completions of one group with the same text are judged once (``twins.py``). A score lease names its suite, which a node asks for once.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import structlog

from protocol import messages as m
from protocol.codec import Array, Received
from protocol.config import RunConfig
from protocol.suites import TestSuite
from protocol.tasks import Task
from protocol.verdicts import Verdict
from services.coordinator.config import CoordinatorConfig
from services.coordinator.counts import TokenCounts
from services.coordinator.groups import Group, Sample, sample_problem
from services.coordinator.membership import Lease, Members, Node, Reply, is_current
from services.coordinator.pool import Pool
from services.coordinator.twins import Twins

log = structlog.get_logger()

SUSPECT_DEATHS = 2  # of nodes, on one piece of work: the first may be anybody's, and costs no speed
ACK = m.Ack()


class LeaseDesk:
    """See the module. ``reply`` puts a message into the coordinator's outbox; ``on_progress`` is called when the run moved on; ``known_nodes``
    were in the run when an earlier coordinator died."""

    def __init__(
        self,
        run: RunConfig,
        config: CoordinatorConfig,
        tasks: list[Task],
        *,
        pool: Pool,
        members: Members,
        counts: TokenCounts,
        reply: Reply,
        on_progress: Callable[[], None],
        known_nodes: Iterable[str] = (),
    ) -> None:
        self._run, self._config, self._tasks = run, config, tasks
        self._pool, self._members, self._counts = pool, members, counts
        self._reply, self._on_progress = reply, on_progress
        self.verdicts: Counter[str] = Counter()
        self.num_copied = 0  # verdicts that came from a twin
        self._twins = Twins()
        self._routed_experts_kind: tuple[Any, ...] | None = (
            None  # dtype, layers and experts per token of all routed_experts of the run
        )
        self._suites: dict[str, TestSuite] = {}  # by name: those that a lease has named
        self._to_generate: dict[int, None] = {}
        self._to_score: deque[tuple[int, int]] = deque()
        self._claimable = {g.group_id for g in pool.groups.values()}  # of an earlier life of this coordinator
        self._awaited = set(known_nodes)  # may work on them; as long as a node may be silent
        self._claims_until = time.monotonic() + config.node_timeout_s

    def add(self, groups: list[Group]) -> None:
        """Newly admitted groups, to be generated."""
        self._to_generate.update(dict.fromkeys(group.group_id for group in groups))

    def claim(self, node: Node, open_leases: list[m.OpenLease]) -> None:
        """A node joins again after this coordinator's restart: what it works on stays its own, if nobody has done it."""
        now = time.monotonic()
        self._awaited.discard(node.node_id)
        taken = {(lease.group_id, lease.sample_index) for lease in self._members.leases.values()}
        for open_ in open_leases:
            group = self._pool.groups.get(open_.group_id)
            if group is None or group.group_id not in self._claimable or (open_.group_id, open_.sample_index) in taken:
                continue
            if open_.sample_index is None:
                if group.missing(self._config.group_size):
                    deadline = now + self._config.generate_timeout_s
                    self._members.adopt(Lease(open_.lease_id, node.node_id, group.group_id, None, deadline))
                continue
            sample = group.samples.get(open_.sample_index)
            if sample is not None and sample.result is None and not sample.lost:
                deadline = now + self._config.score_timeout_s
                lease = Lease(open_.lease_id, node.node_id, group.group_id, open_.sample_index, deadline)
                self._twins.begin(self._members.adopt(lease).lease_id, group.group_id, sample.text)
                self._name_suite(group)

    def _queue_unclaimed(self) -> None:
        """All nodes have claimed what they work on, or are gone: the rest of what a restart found unfinished is given out."""
        taken = {(lease.group_id, lease.sample_index) for lease in self._members.leases.values()}
        unfinished = (group_id for group_id in self._claimable if group_id in self._pool.groups)
        groups = [self._pool.groups[group_id] for group_id in sorted(unfinished)]
        waiting = [g.group_id for g in groups if g.missing(self._config.group_size) and (g.group_id, None) not in taken]
        self._to_generate = {**dict.fromkeys(waiting), **self._to_generate}
        queued = set(self._to_score)
        scores = [(group.group_id, sample.sample_index) for group, sample in self._pool.unjudged()]
        self._to_score.extend(key for key in scores if key not in taken and key not in queued)
        self._claimable = set()

    def expire(self, now: float) -> None:
        """End the leases that are past their deadline."""
        for lease in self._members.expired(now):
            self._members.end_lease(lease.lease_id)
            kind = "generate" if lease.sample_index is None else "score"
            error = f"not done within coordinator.{kind}_timeout_s on {lease.node_id}"
            log.warning("lease_expired", group=lease.group_id, sample=lease.sample_index, node=lease.node_id)
            node = self._members.nodes.get(lease.node_id)
            if node is not None and lease.sample_index is None:  # a late verdict is as good as another
                self._reply(node.identity, m.CancelLease(lease_id=lease.lease_id, reason=error))
            self.failed(lease, error)

    # ---- results ----

    def on_sample(self, node: Node, message: m.SampleResult, received: Received) -> None:
        """A completion: acknowledged when it is in the journal."""
        num_tokens = int(received.arrays["completion_ids"].size)
        if self._pool.has_sample(message.group_id, message.sample_index, received.arrays):
            self._counts.duplicate(node, num_tokens)
            self._end_if_complete(message)
            return self._reply(node.identity, ACK, received.seq)
        if reason := self._sample_problem(message, received.arrays):
            self._counts.thrown_away(node, num_tokens)
            log.warning("sample_refused", node=node.node_id, group=message.group_id, reason=reason)
            if lease := self._members.end_lease(message.lease_id):
                self.failed(lease, reason)
            return self._reply(node.identity, m.Ack(accepted=False, reason=reason), received.seq)
        if (routed_experts := received.arrays.get("routed_experts")) is not None:
            self._routed_experts_kind = (routed_experts.dtype.name, *routed_experts.shape[1:])
        accepted = self._pool.add_sample(
            message.group_id,
            message.sample_index,
            text=message.text,
            finish_reason=message.finish_reason,
            segments=message.segments,
            arrays=received.arrays,
        )
        if accepted:
            self._counts.accepted(node, num_tokens)
            self._on_progress()
            self._to_score.append((message.group_id, message.sample_index))
        else:
            self._counts.duplicate(node, num_tokens)
        self._end_if_complete(message)
        return self._reply(node.identity, ACK if accepted else m.Ack(accepted=False, reason="duplicate"), received.seq)

    def repeated(self, node: Node, received: Received) -> None:
        """A request came again that was answered before; its answer goes out again."""
        message = received.message
        if isinstance(message, m.SampleResult):
            self._counts.repeated(node, int(received.arrays["completion_ids"].size))
        elif isinstance(message, m.LeaseFailed | m.LeaseCancelled):
            self._counts.repeated(node, message.num_tokens)

    def _sample_problem(self, message: m.SampleResult, arrays: Mapping[str, Array]) -> str:
        """Why it can't be trained on, or ''."""
        if problem := sample_problem(message, arrays, with_routed_experts=self._run.routing_replay):
            return problem
        routed_experts = arrays.get("routed_experts")
        kind = self._routed_experts_kind
        if (
            routed_experts is not None
            and kind is not None
            and kind != (routed_experts.dtype.name, *routed_experts.shape[1:])
        ):
            return f"routed_experts of {(routed_experts.dtype.name, *routed_experts.shape[1:])}, where those of other samples are of {kind}: another model"
        return self._version_problem(message)

    def _version_problem(self, message: m.SampleResult) -> str:
        """Why tokens of these versions can't be of this group, or ''. Taken in, they would stop the step that trains on them."""
        group = self._pool.groups.get(message.group_id)
        versions = [segment.version for segment in message.segments]
        newest = self._pool.version + 1  # published, and not committed yet
        if group is None or group.admitted_version <= min(versions) <= max(versions) <= newest:
            return ""
        return f"tokens of versions {versions}; the group was admitted at {group.admitted_version}, and the newest is {newest}"

    def _end_if_complete(self, message: m.SampleResult) -> None:
        """The lease, too, of a node whose samples came second."""
        group = self._pool.groups.get(message.group_id)
        if group is None or len(group.samples) == self._config.group_size:
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
        self._reply(node.identity, ACK, received.seq)

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
        self._counts.thrown_away(node, message.num_tokens)
        if lease := self._members.end_lease(message.lease_id):
            log.warning(
                "lease_failed",
                node=node.node_id,
                group=lease.group_id,
                error=message.error,
                permanent=message.permanent,
            )
            self.failed(lease, message.error, permanent=message.permanent)
        self._reply(node.identity, ACK, received.seq)

    def on_lease_cancelled(self, node: Node, message: m.LeaseCancelled, received: Received) -> None:
        """The node gave it back; no attempt is counted."""
        self._counts.thrown_away(node, message.num_tokens)
        if lease := self._members.end_lease(message.lease_id):
            self.interrupted([lease])
        self._reply(node.identity, ACK, received.seq)

    # ---- giving out ----

    def dispatch(self) -> None:
        """Give waiting work to nodes with room."""
        now = time.monotonic()
        if self._claimable and (not self._awaited or now >= self._claims_until):
            self._queue_unclaimed()
        rollouts = [n for n in self._members.of_role("rollout") if is_current(n, self._pool.version)]
        if self._to_generate and _room(rollouts):
            for group_id in list(self._to_generate):
                if self._lease_generate(rollouts, group_id, now):
                    del self._to_generate[group_id]
                    if not _room(rollouts):
                        break
        rewards = self._members.of_role("reward")
        room, held = _room(rewards), []
        while self._to_score and room > 0:
            key = self._to_score.popleft()
            num_leases = len(self._members.leases)
            if not self._lease_score(rewards, *key, now):
                held.append(key)
            room -= len(self._members.leases) - num_leases
        self._to_score.extendleft(reversed(held))

    def _lease_generate(self, nodes: list[Node], group_id: int, now: float) -> bool:
        """False: the nodes that have not failed on the group are all busy. One that fails at once is always free."""
        group = self._pool.groups.get(group_id)
        missing = group.missing(self._config.group_size) if group else []
        if group is None or not missing:
            return True
        node = self._freest(nodes, group.avoid_nodes, suspect=group.deaths >= SUSPECT_DEATHS)
        if node is None:
            return False
        task = self._tasks[group.task_index]
        deadline = now + self._config.generate_timeout_s
        lease = self._members.grant(node, group_id, None, deadline, suspect=group.deaths >= SUSPECT_DEATHS)
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
        node = self._freest(nodes, sample.avoid_nodes, suspect=sample.deaths >= SUSPECT_DEATHS)
        if node is None:
            return False
        deadline = now + self._config.score_timeout_s
        lease = self._members.grant(node, group_id, sample_index, deadline, suspect=sample.deaths >= SUSPECT_DEATHS)
        self._twins.begin(lease.lease_id, group_id, sample.text)
        message = m.ScoreLease(
            lease_id=lease.lease_id,
            group_id=group_id,
            sample_index=sample_index,
            completion=sample.text,
            suite_hash=self._name_suite(group),
            timeout_s=self._config.score_timeout_s,
        )
        self._reply(node.identity, message)
        return True

    def _name_suite(self, group: Group) -> str:
        """The name of a group's suite, under which a node may ask for it from now on."""
        suite = self._tasks[group.task_index].tests
        self._suites[suite.content_hash] = suite
        return suite.content_hash

    def failed(self, lease: Lease, error: str, *, permanent: bool = False) -> None:
        """A lease that its node could not do, or not in time: an attempt is counted."""
        if lease.sample_index is None:
            again = self._pool.generation_failed(lease.group_id, error, permanent=permanent, node_id=lease.node_id)
            return self._after_generation(lease.group_id, again=again)
        result = m.JudgeResult(verdict=Verdict.INFRA_ERROR, message=error)
        self._score(lease.group_id, lease.sample_index, result, lease.node_id)
        self._release_twins(lease)

    def interrupted(self, leases: list[Lease], *, died: str = "") -> None:
        """Leases of a node that gave them back; or that ``died``, which may be what they did to it."""
        for lease in reversed(leases):
            if lease.sample_index is None:
                again = self._pool.generation_interrupted(lease.group_id, died=died)
                self._after_generation(lease.group_id, again=again)
                continue
            if self._pool.scoring_interrupted(lease.group_id, lease.sample_index, died=died):
                self._to_score.appendleft((lease.group_id, lease.sample_index))
            self._release_twins(lease)

    def _after_generation(self, group_id: int, *, again: bool) -> None:
        """A generate lease ended without its samples: the group is generated again; or it is out, and nobody needs to work on it any more."""
        if again:
            self._again(group_id)
        elif group_id not in self._pool.groups:
            for lease in [lease for lease in self._members.leases.values() if lease.group_id == group_id]:
                self._members.end_lease(lease.lease_id)
                self._twins.end(lease.lease_id)
                cancel = m.CancelLease(lease_id=lease.lease_id, reason=f"group {group_id} is given up")
                self._reply(self._members.nodes[lease.node_id].identity, cancel)

    def _again(self, group_id: int) -> None:
        self._to_generate = {group_id: None, **self._to_generate}  # it is older than what waits

    def _freest(self, nodes: list[Node], avoid: set[str], *, suspect: bool) -> Node | None:
        """The node with the most room, of those that are not to be avoided if there are any; None: it has no room.

        A suspect goes where no other suspect is: if that node dies too, it is clear which of them to count it for.
        """
        nodes = [node for node in nodes if node.node_id not in avoid] or nodes if avoid else nodes
        if suspect:
            nodes = [node for node in nodes if not self._members.has_suspect(node)]
        best, most = None, 0
        for node in nodes:  # of all nodes, for every lease: ``node.free`` would cost three times as much
            if (free := node.capacity - len(node.lease_ids)) > most:
                best, most = node, free
        return best


def _room(nodes: list[Node]) -> int:
    """Leases that ``nodes`` would still take."""
    return sum(max(0, node.free) for node in nodes)
