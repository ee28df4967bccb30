"""Leases: which work waits, which node gets it, and what becomes of the results.

A generate lease is one group (the samples of it that are missing), a score lease one sample. Work that a node has failed on goes
to another while there is one. Every end of a lease comes through here: results, failures, cancellations, deadlines, deaths.
Completions of one group with the same text are judged once (``SharedVerdicts``). A score lease names its suite, which a node asks for once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from protocol import messages as m
from protocol.codec import Array, Received
from protocol.config import RunConfig
from protocol.suites import TestSuite
from protocol.tasks import Task
from protocol.verdicts import JudgeResult, Verdict
from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.effects import Effects
from services.coordinator.core.groups import Group, Sample, sample_problem
from services.coordinator.core.ledger import TokenCounts
from services.coordinator.core.membership import Lease, Members, Node
from services.coordinator.core.pool import Pool

SUSPECT_DEATHS = 2  # of nodes, on one piece of work: one death may have any cause, and suspicion costs speed
UNCONFIRMED_BEATS = 3  # heartbeat intervals after which a lease that the node does not list is sent again
ACK = m.Ack()


class SharedVerdicts:
    """Samples of one group with the same text: one of them is judged at a time, and its verdict serves the others.

    Policies repeat themselves, the more the longer they are trained. Only what is under way is kept here; verdicts are in the group.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, str], list[int]] = {}  # (group, text) under lease -> samples that wait for it
        self._leased: dict[str, tuple[int, str]] = {}  # by lease

    def begin(self, lease_id: str, group_id: int, text: str) -> None:
        """A sample of this text is judged under ``lease_id``."""
        self._leased[lease_id] = (group_id, text)
        self._waiting.setdefault((group_id, text), [])

    def wait(self, group_id: int, text: str, sample_index: int) -> bool:
        """Whether ``sample_index`` waits for a lease of its text from now on; False: there is none."""
        waiting = self._waiting.get((group_id, text))
        if waiting is None:
            return False
        if sample_index not in waiting:
            waiting.append(sample_index)
        return True

    def end(self, lease_id: str) -> list[int]:
        """The lease is over, whatever became of it: the samples that waited for it, in order."""
        key = self._leased.pop(lease_id, None)
        return [] if key is None else self._waiting.pop(key, [])


class Leases:
    """See the module. ``known_nodes`` were in the run when an earlier coordinator died, and may still work for it."""

    def __init__(
        self,
        run: RunConfig,
        config: CoordinatorConfig,
        tasks: list[Task],
        *,
        pool: Pool,
        members: Members,
        counts: TokenCounts,
        effects: Effects,
        known_nodes: Iterable[str],
        now: float,
    ) -> None:
        self._run, self._config, self._tasks = run, config, tasks
        self._pool, self._members, self._counts, self._effects = pool, members, counts, effects
        self.verdicts: Counter[str] = Counter()
        self.num_copied = 0  # verdicts that came from a sample with the same text
        self._shared = SharedVerdicts()
        # dtype, layers and experts per token of all routed_experts of the run
        self._routed_experts_kind: tuple[Any, ...] | None = None
        self._suites: dict[str, TestSuite] = {}  # by content hash: those that a lease has named
        self._to_generate: deque[int] = deque()
        self._to_score: deque[tuple[int, int]] = deque()
        self._claimable = set(pool.groups)  # of an earlier life of this coordinator
        self._awaited = set(known_nodes)  # may work on them, as long as a node may be silent
        self._claims_until = now + config.node_timeout_s

    def add(self, groups: Iterable[Group]) -> None:
        """Newly admitted groups, to be generated."""
        self._to_generate.extend(group.group_id for group in groups)

    # ---- after a restart ----

    def claim(self, node: Node, open_leases: list[m.OpenLease], now: float) -> None:
        """A node joins again after this coordinator's restart: it keeps the work that it holds, if nobody has done it."""
        self._awaited.discard(node.node_id)
        if not open_leases:
            return
        taken = self._taken()
        for held in open_leases:
            group = self._pool.groups.get(held.group_id)
            if group is None or group.group_id not in self._claimable or (held.group_id, held.sample_index) in taken:
                continue
            lease = Lease(held.lease_id, node.node_id, group.group_id, held.sample_index, now, now)
            if held.sample_index is None:
                if group.missing(self._config.group_size):
                    lease.deadline += self._config.generate_timeout_s
                    self._members.adopt(lease)
            elif group.is_unjudged(held.sample_index):
                lease.deadline += self._config.score_timeout_s
                self._shared.begin(
                    self._members.adopt(lease).lease_id, group.group_id, group.samples[held.sample_index].text
                )
                self._name_suite(group)

    def _taken(self) -> set[tuple[int, int | None]]:
        return {(lease.group_id, lease.sample_index) for lease in self._members.leases.values()}

    def _queue_unclaimed(self) -> None:
        """All nodes have claimed what they work on, or are gone: the rest of what a restart found unfinished is given out."""
        taken, size = self._taken(), self._config.group_size
        queued_groups, queued_samples = set(self._to_generate), set(self._to_score)
        groups = [group for group_id in sorted(self._claimable) if (group := self._pool.groups.get(group_id))]
        waiting = [
            group.group_id
            for group in groups
            if group.missing(size) and (group.group_id, None) not in taken and group.group_id not in queued_groups
        ]
        self._to_generate.extendleft(reversed(waiting))
        scores = [(group.group_id, sample.sample_index) for group, sample in self._pool.unjudged()]
        self._to_score.extend(key for key in scores if key not in taken and key not in queued_samples)
        self._claimable = set()

    # ---- results ----

    def on_sample(self, node: Node, message: m.SampleResult, received: Received, now: float) -> None:
        """A completion: acknowledged when it is in the journal."""
        group_id, index, arrays = message.group_id, message.sample_index, received.arrays
        num_tokens = int(arrays["completion_ids"].size)
        ack = ACK
        if self._pool.has_sample(group_id, index, arrays):
            self._counts.duplicate(node, num_tokens)
        elif reason := self._sample_problem(message, arrays):
            self._counts.discarded(node, num_tokens)
            self._effects.warning("sample_refused", node=node.node_id, group=group_id, reason=reason)
            if lease := self._members.end_lease(message.lease_id):
                self.failed(lease, reason)
            return self._effects.reply(node, received.seq, m.Ack(accepted=False, reason=reason))
        else:
            sample = Sample(index, message.text, message.finish_reason, message.segments, arrays)
            if self._pool.add_sample(group_id, sample):
                self._counts.accepted(node, num_tokens)
                self._effects.progress = True
                self._to_score.append((group_id, index))
            else:
                self._counts.duplicate(node, num_tokens)
                ack = m.Ack(accepted=False, reason="duplicate")
        group = self._pool.groups.get(group_id)
        if group is None or len(group.samples) == self._config.group_size:  # also where the node's samples came second
            self._members.end_lease(message.lease_id)
        return self._effects.reply(node, received.seq, ack)

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
        if (routed_experts := arrays.get("routed_experts")) is not None:
            kind = (routed_experts.dtype.name, *routed_experts.shape[1:])
            self._routed_experts_kind = self._routed_experts_kind or kind
            if kind != self._routed_experts_kind:
                return (
                    f"routed_experts of {kind}, where those of other samples are of {self._routed_experts_kind}: "
                    "another model"
                )
        return self._version_problem(message)

    def _version_problem(self, message: m.SampleResult) -> str:
        """Why tokens of these versions can't be of this group, or ''. Taken in, they would stop the step that trains on them."""
        if (group := self._pool.groups.get(message.group_id)) is None:
            return ""
        newest = self._pool.version + 1  # sent to the engines, and not committed yet
        if all(group.admitted_version <= segment.version <= newest for segment in message.segments):
            return ""
        versions = [segment.version for segment in message.segments]
        return f"tokens of versions {versions}; the group was admitted at {group.admitted_version}, and the newest is {newest}"

    def on_score(self, node: Node, message: m.ScoreResult, received: Received, now: float) -> None:
        """A verdict, or the judge's failure to give one."""
        lease = self._members.end_lease(message.lease_id)
        if lease is not None:
            self.verdicts[message.result.verdict] += 1
        if lease is not None or message.result.reward is not None:  # a late failure was counted when its lease ended
            self._score(message.group_id, message.sample_index, message.result, node.node_id)
        if lease is not None:
            self._end_sharing(lease)
        self._effects.reply(node, received.seq, ACK)

    def on_suite_request(self, node: Node, message: m.SuiteRequest, received: Received, now: float) -> None:
        """A reward node has a lease of a suite that it lacks."""
        suite = self._suites.get(message.suite_hash)
        if suite is None:
            reason = f"No lease since this coordinator started names a suite {message.suite_hash[:64]!r}."
            return self._effects.reply(node, received.seq, m.Refused(reason=reason, fatal=False))
        data = {"json_utf8": np.frombuffer(suite.to_json(), dtype=np.uint8)}
        return self._effects.reply(node, received.seq, m.Suite(suite_hash=message.suite_hash), data)

    def _score(self, group_id: int, sample_index: int, result: JudgeResult, node_id: str) -> None:
        if self._pool.add_result(group_id, sample_index, result, node_id=node_id):
            self._to_score.append((group_id, sample_index))
        else:
            self._effects.progress = True

    def _copy_verdict(self, group: Group, sample: Sample) -> bool:
        """Give ``sample`` the verdict of a judged sibling with the same text, if there is one."""
        for sibling in group.samples.values():
            if sibling.result is not None and sibling.text == sample.text:
                self.verdicts[sibling.result.verdict] += 1
                self.num_copied += 1
                self._score(group.group_id, sample.sample_index, sibling.result, "")
                return True
        return False

    def _end_sharing(self, lease: Lease) -> None:
        """A score lease is over: samples that waited for its verdict take it, or are judged after all."""
        for sample_index in reversed(self._shared.end(lease.lease_id)):
            group = self._pool.groups.get(lease.group_id)
            if group is not None and not self._copy_verdict(group, group.samples[sample_index]):
                self._to_score.appendleft((lease.group_id, sample_index))

    # ---- leases that end without a result ----

    def on_lease_failed(self, node: Node, message: m.LeaseFailed, received: Received, now: float) -> None:
        """The node could not do it."""
        self._counts.discarded(node, message.num_tokens)
        if lease := self._members.end_lease(message.lease_id):
            self._effects.warning(
                "lease_failed",
                node=node.node_id,
                group=lease.group_id,
                error=message.error,
                permanent=message.permanent,
            )
            self.failed(lease, message.error, permanent=message.permanent)
        self._effects.reply(node, received.seq, ACK)

    def on_lease_cancelled(self, node: Node, message: m.LeaseCancelled, received: Received, now: float) -> None:
        """The node gave it back; no attempt is counted."""
        self._counts.discarded(node, message.num_tokens)
        if lease := self._members.end_lease(message.lease_id):
            self.interrupted([lease])
        self._effects.reply(node, received.seq, ACK)

    def expire(self, now: float) -> None:
        """End the leases that are past their deadline."""
        for lease in self._members.expired(now):
            self._members.end_lease(lease.lease_id)
            kind = "generate" if lease.sample_index is None else "score"
            error = f"not done within coordinator.{kind}_timeout_s on {lease.node_id}"
            self._effects.warning("lease_expired", group=lease.group_id, sample=lease.sample_index, node=lease.node_id)
            if lease.sample_index is None:  # a late verdict is as good as another
                self._cancel(lease, error)
            self.failed(lease, error)

    def failed(self, lease: Lease, error: str, *, permanent: bool = False) -> None:
        """A lease that its node could not do, or not in time: an attempt is counted."""
        if lease.sample_index is None:
            again = self._pool.generation_failed(lease.group_id, error, permanent=permanent, node_id=lease.node_id)
            return self._after_generation(lease.group_id, again=again)
        result = JudgeResult(verdict=Verdict.INFRA_ERROR, message=error)
        self._score(lease.group_id, lease.sample_index, result, lease.node_id)
        self._end_sharing(lease)

    def interrupted(self, leases: list[Lease], *, died: str = "") -> None:
        """Leases of a node that gave them back; or that ``died``, which they may have caused."""
        for lease in reversed(leases):
            if lease.sample_index is None:
                again = self._pool.generation_interrupted(lease.group_id, died=died)
                self._after_generation(lease.group_id, again=again)
                continue
            if self._pool.scoring_interrupted(lease.group_id, lease.sample_index, died=died):
                self._to_score.appendleft((lease.group_id, lease.sample_index))
            self._end_sharing(lease)

    def _after_generation(self, group_id: int, *, again: bool) -> None:
        """A generate lease ended without its samples: the group is generated again, before younger ones; or it is out, and all work on it
        is cancelled."""
        if again:
            self._to_generate.appendleft(group_id)
        elif group_id not in self._pool.groups:
            for lease in [lease for lease in self._members.leases.values() if lease.group_id == group_id]:
                self._members.end_lease(lease.lease_id)
                self._shared.end(lease.lease_id)
                self._cancel(lease, f"group {group_id} is given up")

    def _cancel(self, lease: Lease, reason: str) -> None:
        if node := self._members.nodes.get(lease.node_id):
            self._effects.send(node.identity, m.CancelLease(lease_id=lease.lease_id, reason=reason))

    # ---- giving out ----

    def dispatch(self, now: float) -> None:
        """Give waiting work to nodes with room."""
        if self._claimable and (not self._awaited or now >= self._claims_until):
            self._queue_unclaimed()
        rollouts, rewards = self._members.credits["rollout"], self._members.credits["reward"]
        if self._to_generate and rollouts.total:
            busy = []  # work whose nodes are all busy: those that have not failed on it
            while self._to_generate and rollouts.total:
                group_id = self._to_generate.popleft()
                if not self._lease_generate(group_id, now):
                    busy.append(group_id)
            self._to_generate.extendleft(reversed(busy))
        if self._to_score and rewards.total:
            held = []
            while self._to_score and rewards.total:
                key = self._to_score.popleft()
                if not self._lease_score(*key, now):
                    held.append(key)
            self._to_score.extendleft(reversed(held))

    def _lease_generate(self, group_id: int, now: float) -> bool:
        """False: the nodes that have not failed on the group are all busy."""
        group = self._pool.groups.get(group_id)
        if group is None or not group.missing(self._config.group_size):
            return True
        node, suspect = self._find_node("rollout", group.avoid_nodes, group.deaths)
        if node is None:
            return False
        timeout_s = self._config.generate_timeout_s
        lease = self._members.grant(node, group_id, None, now=now, timeout_s=timeout_s, suspect=suspect)
        self._send(node, lease, group)
        return True

    def _lease_score(self, group_id: int, sample_index: int, now: float) -> bool:
        """False: the nodes that have not failed on the sample are all busy."""
        group = self._pool.groups.get(group_id)
        if group is None or not group.is_unjudged(sample_index):
            return True
        sample = group.samples[sample_index]
        if self._copy_verdict(group, sample) or self._shared.wait(group_id, sample.text, sample_index):
            return True
        node, suspect = self._find_node("reward", sample.avoid_nodes, sample.deaths)
        if node is None:
            return False
        timeout_s = self._config.score_timeout_s
        lease = self._members.grant(node, group_id, sample_index, now=now, timeout_s=timeout_s, suspect=suspect)
        self._shared.begin(lease.lease_id, group_id, sample.text)
        self._send(node, lease, group)
        return True

    def _find_node(self, role: str, avoid: set[str], deaths: int) -> tuple[Node | None, bool]:
        """The node with the most free credits, and whether the work is suspect: nodes died on it.

        Suspect work goes where no other suspect is: if that node dies too, it is clear which of them to count it for.
        """
        if deaths < SUSPECT_DEATHS:
            return self._members.credits[role].best(avoid=avoid), False
        return self._members.credits[role].best(avoid=avoid, skip=lambda node: node.num_suspects > 0), True

    def _send(self, node: Node, lease: Lease, group: Group) -> None:
        """The message of ``lease``, for the first time or again."""
        task = self._tasks[group.task_index]
        message: m.Message
        if lease.sample_index is None:
            message = m.GenerateLease(
                lease_id=lease.lease_id,
                group_id=lease.group_id,
                task_id=task.task_id,
                prompt=task.prompt,
                sample_indices=group.missing(self._config.group_size),
                sampling=m.Sampling(max_tokens=self._run.max_completion_tokens, temperature=self._run.temperature),
                seed=(self._run.seed * 1_000_003 + lease.group_id * 1009) % 2**31,
                timeout_s=self._config.generate_timeout_s,
            )
        else:
            message = m.ScoreLease(
                lease_id=lease.lease_id,
                group_id=lease.group_id,
                sample_index=lease.sample_index,
                completion=group.samples[lease.sample_index].text,
                suite_hash=self._name_suite(group),
                timeout_s=self._config.score_timeout_s,
            )
        self._effects.send(node.identity, message)

    def send_unconfirmed(self, node: Node, held: list[str], now: float) -> None:
        """Send again the leases that ``node`` has had for some heartbeats and does not list: the message is lost, which costs no attempt."""
        grace_s = UNCONFIRMED_BEATS * self._config.heartbeat_interval_s
        known = set(held)
        for lease in node.leases.values():
            group = self._pool.groups.get(lease.group_id)
            if group is not None and lease.lease_id not in known and now - lease.sent_at > grace_s:
                lease.sent_at = now
                self._effects.warning("lease_sent_again", group=lease.group_id, node=node.node_id)
                self._send(node, lease, group)

    def _name_suite(self, group: Group) -> str:
        """The content hash of a group's suite, under which a node may ask for it from now on."""
        suite = self._tasks[group.task_index].tests
        self._suites[suite.content_hash] = suite
        return suite.content_hash
