"""What a run's nodes were told, kept apart from the coordinator, and what must be so at any time."""

import json

from coordinator_world import REWARDS, Learner, Reward, Rollout, World

from services.coordinator.core.groups import GroupStatus
from services.coordinator.status import build_status

BEAT_S = 1.0
TERMS = ("trained", "buffered", "filtered", "failed", "duplicate", "lost", "in_flight")


def tokens_of(message, arrays):
    """That a message tells of."""
    return arrays["completion_ids"].size if "completion_ids" in arrays else getattr(message, "num_tokens", 0)


def digest(pool):
    """All that a restart must bring back. (Steps whose samples are kept can be more after it, but never fewer.)"""
    groups = {
        group.group_id: (
            (group.draw, group.task_index, group.admitted_version, group.status, group.step),
            (group.overtaken, group.generate_attempts, group.deaths),
            {
                index: (
                    (s.text, s.finish_reason, s.segments, {name: array.tolist() for name, array in s.arrays.items()}),
                    (s.result, s.score_attempts, s.deaths, s.lost),
                )
                for index, s in sorted(group.samples.items())
            },
        )
        for group in pool.groups.values()
    }
    return {
        "version": pool.version,
        "next group": pool.next_group_id,
        "tasks that failed": dict(pool.quarantine.failures),
        "tasks that are out": dict(pool.quarantine.tasks),
        "ledger": pool.ledger.model_dump(),
        "staleness": dict(pool.staleness_counts),
        "groups": groups,
    }


class Model(World):
    """What nodes were told, kept apart from the coordinator: no crash may make any of it untrue."""

    def __init__(self, folder, config, num_tasks):
        self.acked = {}  # (group, sample) -> serial of the completion
        self.scored = set()  # (group, sample)
        self.batches = {}  # step -> what it was made of
        self.step_of = {}  # group -> step
        self.committed = 0  # by what the learner was told
        self.durable = None  # digest of the pool, once something was written
        self.first_kept_step = 1
        self.out = {}  # tasks that are out
        self.seen_groups = 0  # group ids below it are admitted
        self.slack = 0  # tokens that nodes told of twice, as no node of ours does: under another number
        super().__init__(folder, config, num_tasks)

    @property
    def pool(self):
        return self.core.pool

    def crash(self, *, durable, num_sent):
        super().crash(durable=durable, num_sent=num_sent)
        if self.durable is not None:
            found = digest(self.pool)
            changed = {key: (value, found[key]) for key, value in self.durable.items() if found[key] != value}
            assert not changed, f"a restart brought back something else than was written: {changed}"
            assert self.pool.first_kept_step <= self.first_kept_step
        self.seen_groups = self.pool.next_group_id

    def on_durable(self):
        self.durable, self.first_kept_step = digest(self.pool), self.pool.first_kept_step

    def on_sample_acked(self, request, serial):
        key = (request.group_id, request.sample_index)
        assert self.acked.setdefault(key, serial) == serial, f"{key} was accepted twice"

    def on_score_acked(self, request):
        self.scored.add((request.group_id, request.sample_index))

    def on_batch(self, batch, arrays):
        starts, start = [], 0
        for sample in batch.samples:
            starts.append(start)
            start += sample.num_completion_tokens
        content = [
            (s.group_id, s.sample_index, s.reward, tuple(s.segments), int(arrays["completion_ids"][at]))
            for s, at in zip(batch.samples, starts, strict=True)
        ]
        assert start == arrays["completion_ids"].size == arrays["logprobs"].size
        assert self.batches.setdefault(batch.step, content) == content, f"the batch of step {batch.step} has changed"
        assert batch.replay == (batch.step <= self.pool.version)
        for group_id, index, _, segments, serial in content:
            assert self.step_of.setdefault(group_id, batch.step) == batch.step, f"group {group_id} is in two steps"
            assert self.acked.get((group_id, index), serial) == serial, "another completion than was acknowledged"
            age = batch.step - 1 - min(segment.version for segment in segments)
            assert 0 <= age <= self.config.max_staleness
        num_groups = len({sample.group_id for sample in batch.samples})
        assert num_groups == self.config.groups_per_step or self.pool.out_of_tasks

    def on_commit_acked(self, step):
        assert step <= self.committed + 1, "a gap between the steps"
        self.committed = max(self.committed, step)

    def on_end_of_data(self, step):
        assert step == self.pool.version
        assert self.pool.out_of_tasks or step == self.config.max_steps
        assert not self.pool.groups

    # ---- what must be so at any time ----

    def check(self):
        pool, config = self.pool, self.config
        pool.ledger.check(buffered=pool.buffered_tokens, live_groups=len(pool.groups))
        failure = self.failure
        assert failure is None or pool.quarantine.give_up_reason, failure
        self._check_status()
        assert pool.version >= self.committed, "an acknowledged commit was undone"
        steps = [step for step, _, _ in self.core.steps.recent]
        assert steps == list(range(1, pool.version + 1))
        places = (config.max_staleness + 1 + pool.version) * config.groups_per_step - config.bypass_window
        assert pool.places_taken <= min(places, config.max_steps * config.groups_per_step)
        assert len(pool.groups) <= (config.max_staleness + 1) * config.groups_per_step - config.bypass_window
        for group in pool.groups.values():
            assert group.overtaken <= config.bypass_window
            assert group.group_id < self.seen_groups or group.task_index not in self.out, "a task that is out was drawn"
        self.out, self.seen_groups = dict(pool.quarantine.tasks), pool.next_group_id
        self._check_kept()
        self._check_tokens()

    def _check_status(self):
        status = json.loads(json.dumps(build_status(self)))
        ledger = status["ledger"]
        assert ledger["generated"] == sum(ledger[term] for term in TERMS), ledger
        ended = sum(ledger[f"groups_{what}"] for what in ("trained", "filtered", "failed"))
        assert ledger["groups_admitted"] == ended + sum(status["groups"].values()), ledger

    def _check_kept(self):
        groups = self.pool.groups
        for (group_id, index), serial in self.acked.items():
            if group_id in groups:
                sample = groups[group_id].samples.get(index)
                assert sample is not None, f"sample {index} of group {group_id} was acknowledged and is gone"
                assert sample.arrays["completion_ids"][0] == serial
                assert (group_id, index) not in self.scored or sample.result is not None or sample.lost
            else:
                assert group_id < self.pool.next_group_id
        for step, content in self.batches.items():
            for group_id in {entry[0] for entry in content}:
                group = groups.get(group_id)
                assert group is None or (group.step == step and group.status is GroupStatus.BATCHED)
                assert (group is None) == (step <= self.pool.version)

    def _check_tokens(self):
        """The coordinator never counts more tokens than were generated."""
        generated = sum(node.generated for node in self.nodes if isinstance(node, Rollout))
        written_off = sum(self.core.counts.written_off.values())
        assert self.pool.ledger.lost == written_off, "lost is what was written off and not taken back"
        in_flight = sum(node.tokens_in_flight for node in self.core.members.nodes.values())
        counted = self.pool.ledger.received + in_flight
        assert counted <= generated + self.slack, f"{counted} tokens counted, {generated} generated"

    # ---- everybody does what it should ----

    def fair_round(self):
        """One heartbeat interval in which every live node is well."""
        self.clock.now += BEAT_S
        self.hold = 0
        for node in self.live(object):
            node.beat()
        self.pump()
        self.tick()
        self.pump()
        for node in self.live(Rollout):
            node.capacity = 2
            for lease_id in list(node.leases):
                self.finish_lease(node, lease_id, "x")
        self.pump()
        for node in self.live(Reward):
            node.capacity = 2
            for lease_id in list(node.leases):
                node.judge(lease_id, REWARDS[node.leases[lease_id].sample_index % 2])
        self.pump()
        for node in self.live(Learner):
            node.ask()
            self.pump()
            node.train(self.live(Rollout))
            for engine in self.live(Rollout):
                engine.beat()
            self.pump()
            node.commit()
            self.pump()

    def finish_lease(self, node, lease_id, text):
        draft = node.leases[lease_id]
        if draft.told_to_stop:
            node.give_up(lease_id, failed=False)
        for index in list(draft.todo):
            node.finish(lease_id, text=f"{text}{index}")
