"""The coordinator under random events and crashes: the ledger closes, staleness never passes the cap, no group is trained twice,
what was acknowledged is kept, a step's batch never changes, and the run can always go on.

``FOREBAY_SEARCH=5000 pytest tests/unit/test_coordinator_stateful.py`` looks at so many random runs, other ones each time; without
it the runs are the same everywhere.
"""

import math
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from coordinator_model import BEAT_S, Model, digest, tokens_of
from coordinator_world import BROKEN, REWARDS, Learner, Reward, Rollout
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from protocol import messages as m
from protocol.versions import VersionTag
from services.coordinator.config import CoordinatorConfig

SEARCH = int(os.environ.get("FOREBAY_SEARCH", "0"))
pytestmark = pytest.mark.timeout(0 if SEARCH else 300)
MEMORY = Path("/dev/shm")
NODE_TIMEOUT_S = 3.0
FAIR_ROUNDS = 80  # heartbeats within which healthy nodes must bring the run on
NODES = st.integers(0, 2)
PICK = st.integers(0, 7)
CHOICES = st.lists(st.integers(0, 15), min_size=4, max_size=16)
NEVER = 5  # as the stage of a round


def pick(items, number):
    return items[number % len(items)] if items else None


class CoordinatorMachine(RuleBasedStateMachine):
    """Each rule is an event. Numbers that rules draw choose among what is there."""

    @initialize(
        sizes=st.tuples(st.integers(2, 3), st.integers(1, 3), st.integers(0, 3)),
        window=st.sampled_from([0, 0.5, 1]),
        lengths=st.tuples(st.integers(1, 6), st.sampled_from([2, 6, 40]), st.integers(0, 1)),
        tries=st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 2)),
        filters=st.tuples(st.booleans(), st.integers(0, 3)),
        max_failed_in_a_row=st.sampled_from([2, 64, 64]),
        min_is_less=st.booleans(),
    )
    def begin(self, sizes, window, lengths, tries, filters, max_failed_in_a_row, min_is_less):
        group_size, groups_per_step, max_staleness = sizes
        num_tasks, max_steps, max_epochs = lengths
        config = CoordinatorConfig(
            tasks="t",
            group_size=group_size,
            min_group_size=2 if min_is_less else group_size,
            groups_per_step=groups_per_step,
            max_staleness=max_staleness,
            bypass_window=math.floor(window * max_staleness * groups_per_step),
            max_steps=max_steps,
            max_epochs=max_epochs,
            generate_attempts=tries[0],
            score_attempts=tries[1],
            task_attempts=tries[2],
            **({"dynamic_sampling": True, "max_filtered_per_step": filters[1]} if all(filters) else {}),
            max_failed_in_a_row=max_failed_in_a_row,
            heartbeat_interval_s=BEAT_S,
            node_timeout_s=NODE_TIMEOUT_S,
            generate_timeout_s=6,
            score_timeout_s=4,
            step_timeout_s=1e9,
            no_progress_timeout_s=1e9,
        )
        # A disk's syncs would take minutes.
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self.world = Model(self.folder, config, num_tasks)
        self.exact = True  # nothing has happened that lets tokens go unheard or be counted twice
        self.world.add(Rollout(self.world, "gen0", 0, VersionTag(version=0)))
        self.world.add(Reward(self.world, "judge0", 0))
        self.world.add(Learner(self.world, 0, 0))

    def rollout(self, number):
        return pick(self.world.live(Rollout), number)

    def reward(self, number):
        return pick(self.world.live(Reward), number)

    @property
    def learner(self):
        return pick(self.world.live(Learner), 0)

    # ---- nodes come and go ----

    @rule(number=NODES, fresh=st.booleans(), is_reward=st.booleans())
    def a_node_starts(self, number, fresh, is_reward):
        life = next(self.world.lives)
        if is_reward:
            return self.world.add(Reward(self.world, f"judge{number}", life))
        holds = VersionTag(version=self.world.pool.version if fresh else 0)
        for replaced in self.world.live(Rollout):
            self.exact &= replaced.name != f"gen{number}" or self._has_heard(replaced)
        self.world.add(Rollout(self.world, f"gen{number}", life, holds))

    @rule(number=PICK)
    def learner_restarts(self, number):
        """From the newest checkpoint, or from an older one when the newer ones are lost."""
        step = pick(sorted(self.world.checkpoints, reverse=True), number)
        self.world.checkpoints = {older for older in self.world.checkpoints if older <= step}
        self.world.add(Learner(self.world, next(self.world.lives), step))

    @rule(number=PICK, silently=st.booleans())
    def a_node_goes_away(self, number, silently):
        nodes = self.world.live(Rollout) + self.world.live(Reward)
        node = pick(nodes + self.world.live(Learner) if silently else nodes, number)
        if node is not None:
            if silently:
                node.write_everywhere()
                node.beat()
                self.world.pump()
                self.exact &= self._has_heard(node)
            else:
                self.exact &= self._has_heard(node)
                node.capacity = 0
                for lease_id in list(node.leases):
                    node.give_up(lease_id, failed=False)
                self.world.say(node, 10**6, m.Goodbye(reason="drained"), {})
                self.world.pump()
            node.alive = False

    @rule(seconds=st.sampled_from([0.5, 2.0, 3.5, 7.0]), silent=st.none() | PICK, capacity=st.integers(0, 4))
    def time_passes(self, seconds, silent, capacity):
        """Everybody beats in time, but for one, which may have been too busy; the others' capacity changes."""
        world = self.world
        silent_node = None if silent is None else pick(world.live(object), silent)
        if silent_node:
            silent_node.write_everywhere()
            silent_node.beat()
            world.pump()
        world.clock.now += seconds
        for node in world.live(object):
            node.capacity = capacity
            if node is not silent_node:
                node.beat()
        world.pump()
        known = silent_node and world.core.members.by_identity.get(silent_node.identity)
        world.tick()
        if known and not world.core.members.by_identity.get(known.identity):
            self.exact = False  # until its first heartbeat after it is back
        world.pump()

    # ---- one lease ----

    @rule(number=NODES, lease=PICK, choice=st.integers(0, 15))
    def a_generation_moves(self, number, lease, choice):
        node = self.rollout(number)
        if node and (lease_id := pick(list(node.leases), lease)):
            self._answer(node, lease_id, choice)
            self.world.pump()

    @rule(number=NODES, lease=PICK, choice=st.integers(0, 15))
    def a_judgement_moves(self, number, lease, choice):
        node = self.reward(number)
        if node and (lease_id := pick(list(node.leases), lease)):
            self._judge(node, lease_id, choice)
            self.world.pump()

    @rule(number=PICK, back=PICK, as_new=st.booleans())
    def a_request_comes_again(self, number, back, as_new):
        node = pick(self.world.live(Rollout) + self.world.live(Reward), number)
        seq = pick(node.said[::-1], back) if node is not None else None
        if seq is None:
            return
        self.world.pump()
        is_open = seq in node.pending
        message, arrays = node.say_again(seq, as_new=as_new)
        if isinstance(node, Rollout) and (as_new or not is_open):
            self.exact = False  # no node of ours does this, and it tells of more than was generated
            self.world.slack += tokens_of(message, arrays)
        self.world.pump()

    # ---- training ----

    @rule(what=st.integers(0, 3), missed=st.integers(0, 7), told=st.booleans(), keep=st.integers(0, 3))
    def the_learner_moves(self, what, missed, told, keep):
        if what == 0:
            self._ask()
        elif what == 1:
            self._train(missed, told=told)
        elif what == 2:
            self._commit(keep)
        elif self.learner and self.learner.ended and not self.learner.pending:
            self.learner.request(m.LearnerDone(export_dir="e"))
            self.world.pump()

    @rule(step=st.integers(0, 3))
    def an_old_commit_comes_again(self, step):
        version = self.world.pool.version
        if self.learner and step < version:
            self.learner.request(m.StepCommitted(step=version - step, metrics={}))
            self.world.pump()

    def _ask(self, _following=None):
        if self.learner:
            self.learner.ask()
            self.world.pump()

    def _train(self, missed, *, told):
        """``missed`` is a bit mask of the engines that the publication doesn't reach."""
        if self.learner:
            engines = [node for i, node in enumerate(self.world.live(Rollout)) if not missed >> i & 1]
            for node in engines:
                node.write_everywhere()
            self.learner.train(engines)
            if told:
                for node in engines:
                    node.beat()
            self.world.pump()

    def _commit(self, keep):
        """After it, a checkpoint, of which the newest ``keep`` are kept; 0: none is made."""
        if self.learner:
            self.learner.commit()
            self.world.pump()
        if (learner := self.learner) and keep and learner.batch is None:
            self.world.checkpoints = set(sorted(self.world.checkpoints | {learner.step})[-keep:])

    # ---- much at once ----

    def _round(self, choices, *, crash_after=NEVER, durable=False, num_sent=0):
        """Who is missing is started, each lease is answered, and the learner goes on; a choice of 0 is good behaviour. The coordinator
        may crash after one of these five stages."""
        following = iter(choices)
        stages = (self._start_missing, self._generate, self._judge_all, self._ask, self._train_and_commit)
        for number, stage in enumerate(stages):
            stage(following)
            if number == crash_after:
                self.the_coordinator_crashes(durable=durable, num_sent=num_sent)

    def _start_missing(self, _following):
        if not self.learner:
            self.learner_restarts(0)
        if not self.rollout(0):
            self.a_node_starts(0, fresh=True, is_reward=False)
        if not self.reward(0):
            self.a_node_starts(0, fresh=True, is_reward=True)
        for node in self.world.live(object):
            node.beat()
        self.world.pump()

    def _generate(self, following):
        for node in self.world.live(Rollout):
            for lease_id in list(node.leases):
                self._answer(node, lease_id, next(following, 0))
        self.world.pump()

    def _judge_all(self, following):
        for node in self.world.live(Reward):
            for lease_id in list(node.leases):
                self._judge(node, lease_id, next(following, 0))
        self.world.pump()

    def _train_and_commit(self, following):
        choice = next(following, 0)
        if choice < 14:
            self._train(missed=choice & 7, told=choice < 8)
        if choice < 12:
            self._commit(keep=choice % 3)

    @rule(choices=CHOICES)
    def a_round(self, choices):
        self._round(choices)

    @rule(choices=CHOICES, crash_after=st.integers(0, NEVER), durable=st.booleans(), num_sent=st.integers(0, 9))
    def a_round_with_a_crash(self, choices, crash_after, durable, num_sent):
        self._round(choices, crash_after=crash_after, durable=durable, num_sent=num_sent)

    @rule(first=CHOICES, second=CHOICES)
    def two_rounds(self, first, second):
        """Rules are drawn with equal chances, and most of the time the run should go on."""
        self._round(first)
        self._round(second)

    def _answer(self, node, lease_id, choice):
        draft = node.leases[lease_id]
        if not draft.todo or choice in (13, 15):
            return
        elif choice == 14:
            node.finish(lease_id, text="m", malformed=True)
        elif choice == 12:
            node.give_up(lease_id, failed=len(node.said) % 2 == 0, permanent=len(node.said) % 4 == 0)
        elif choice == 11:
            node.write(draft, 2)
        else:
            for index in draft.todo[:1] if choice == 10 else list(draft.todo):
                node.finish(lease_id, text="same" if choice in (8, 9) else f"t{index}")

    def _judge(self, node, lease_id, choice):
        if choice >= 14:
            node.give_up(lease_id, failed=choice == 14)
        elif choice == 12:
            node.judge(lease_id, BROKEN)
        elif choice != 13:
            index = node.leases[lease_id].sample_index
            node.judge(lease_id, REWARDS[(choice > 5) if choice > 3 else index % 2])

    # ---- the coordinator ----

    @rule(num_messages=st.integers(1, 6))
    def messages_pile_up(self, num_messages):
        """They are handled, and not flushed before there are as many."""
        self.world.hold = num_messages

    @rule(durable=st.booleans(), num_sent=st.integers(0, 12))
    def the_coordinator_crashes(self, durable, num_sent):
        self.exact &= self._knows_of_the_dead()
        self.world.crash(durable=durable, num_sent=num_sent)

    def _has_heard(self, node):
        """Whether the coordinator that lives now knows of all that the engine has told of; else it goes unheard if the engine dies."""
        if not isinstance(node, Rollout):
            return True
        known = self.world.core.members.by_identity.get(node.identity)
        return known is not None and known.counted_tokens + known.tokens_in_flight >= max(node.beaten, node.sent)

    def _knows_of_the_dead(self):
        """Whether all that dead nodes generated is in the journal; else a crash lets it go unheard: they will not say it again."""
        world = self.world
        dead = [node for node in world.nodes if isinstance(node, Rollout) and not node.alive]
        is_written = world.durable is not None and world.durable["ledger"] == world.pool.ledger.model_dump()
        waits = any(node.pending or world.core.members.by_identity.get(node.identity) for node in dead)
        return not dead or (is_written and not waits)

    # ---- what must be so ----

    @invariant()
    def everything_adds_up(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if not hasattr(self, "world"):
            return
        try:
            self._goes_on()
        finally:
            self.world.close()
            shutil.rmtree(self.folder)

    def _goes_on(self):
        """With healthy nodes the next steps come, so many that no group can be passed by them all; or the run is over, or says
        why it can't go on."""
        world = self.world
        world.hold = 0
        world.pump()
        world.check()
        if not self.learner:
            world.add(Learner(world, next(world.lives), max(world.checkpoints)))
        world.add(Rollout(world, "healthy", next(world.lives), VersionTag(version=0)))
        world.add(Reward(world, "honest", next(world.lives)))
        goal = world.pool.version + 1 + math.ceil(world.config.bypass_window / world.config.groups_per_step)
        for _ in range(FAIR_ROUNDS):
            world.fair_round()
            world.check()
            if world.pool.version >= goal or world.core.state != "running" or (self.learner and self.learner.ended):
                break
        else:
            raise AssertionError(f"nothing moves: {digest(world.pool)}")
        if self.exact:
            engines = [node for node in world.nodes if isinstance(node, Rollout)]
            heard_of = sum(node.generated if node.alive else max(node.beaten, node.sent) for node in engines)
            in_flight = sum(node.tokens_in_flight for node in world.core.members.nodes.values())
            assert world.pool.ledger.received + in_flight == heard_of


CoordinatorMachine.TestCase.settings = settings(
    max_examples=SEARCH or 200,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
test_the_run_goes_on_and_adds_up_whatever_happens = CoordinatorMachine.TestCase
