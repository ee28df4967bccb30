"""The evidence of a fault run must see what it is for: planted losses, duplicates and contradictions."""

import random
import shutil
import sqlite3

import numpy as np
import pytest

from protocol import messages as m
from protocol.codec import encode
from tests.faults.evidence import judge, read_books
from tests.faults.interleave import _arrays, _Desk, _one_order
from tests.faults.proxy import Seen

CAPS = {"max_staleness": 0, "bypass_window": 0}


class _Book:
    """A journal of three committed steps of one group each, and what passed on the wire meanwhile."""

    def __init__(self, folder):
        self.seen = []
        desk = _Desk(folder, 3)
        say, seq = desk.say, iter(range(1, 10_000))

        def recorded(node, message, arrays=None):
            number = next(seq)
            out = say(node, message, arrays)
            self._note("up", node, message, number, 0, arrays)
            for answer in out:
                if isinstance(answer, m.Ack):
                    self._note("down", node, answer, 0, number, None)
            return out

        desk.say = recorded
        chance = random.Random(1)
        desk.records = []
        desk.say("judge", m.Hello(role="reward", node_id="judge", host="h", pid=1, capacity=4))
        desk.say("learner", m.Hello(role="learner", node_id="learner", host="h", pid=1))
        newest = m.VersionTag(version=3)
        out = desk.say("gen", m.Hello(role="rollout", node_id="gen", host="h", pid=1, capacity=4, holds=newest))
        for step in (1, 2, 3):
            [lease] = [message for message in out if isinstance(message, m.GenerateLease)]
            assert _one_order(desk, chance, step, lease)
            out = desk.say("learner", m.StepCommitted(step=step, metrics={}))
        desk.write()
        desk.journal.close()
        self.path = folder / "orders.sqlite"

    def _note(self, direction, node, message, seq, re, arrays):
        frames = tuple(bytes(frame) for frame in encode(message, run_id="orders", seq=seq, re=re, arrays=arrays))
        self.seen.append(Seen(0.0, direction, f"{node}#1".encode(), message.kind, seq, re, "", frames))

    def tampered(self, *statements):
        """The verdict on a copy of the journal that ``statements`` have changed."""
        copy = self.path.with_name("copy.sqlite")
        shutil.copy(self.path, copy)
        with sqlite3.connect(copy) as db:
            for statement in statements:
                db.execute(statement)
        db.close()
        return judge(read_books(copy), self.seen, **CAPS, finished=True)


@pytest.fixture
def book(tmp_path):
    return _Book(tmp_path)


def test_an_honest_journal_has_no_problems(book):
    verdict = book.tampered()
    assert (verdict.lost, verdict.duplicated, verdict.problems) == (0, 0, [])


def test_an_acknowledged_sample_that_is_gone_is_lost(book):
    verdict = book.tampered("DELETE FROM samples WHERE sample_id = 4096")
    assert verdict.lost >= 1
    assert "lost: the acknowledged sample 1/0" in verdict.problems


def test_an_acknowledged_verdict_that_is_gone_is_lost(book):
    verdict = book.tampered("DELETE FROM results WHERE sample_id = 4097")
    assert verdict.problems == ["lost: the acknowledged verdict on sample 1/1"]


def test_an_acknowledged_commit_that_is_gone_is_lost(book):
    verdict = book.tampered("UPDATE steps SET committed_at = NULL WHERE step = 3")
    assert "lost: the acknowledged commit of step 3" in verdict.problems


def test_a_group_that_is_in_two_steps_is_a_duplicate(book):
    verdict = book.tampered("UPDATE steps SET group_ids = '[1, 0]' WHERE step = 2")
    assert verdict.duplicated == 1


def test_a_group_of_a_step_that_is_not_trained_is_lost(book):
    verdict = book.tampered("UPDATE groups SET status = 'failed' WHERE group_id = 1")
    assert verdict.lost == 1
    assert any("groups_trained" in problem for problem in verdict.problems), "nor does the ledger agree"


def test_other_content_than_was_sent_is_a_problem(book):
    assert "other content" in book.tampered("UPDATE samples SET text = 'x' WHERE sample_id = 0").problems[0]
    arrays = np.arange(8, dtype="<i4").tobytes().hex()
    assert "other content" in book.tampered(f"UPDATE samples SET arrays = x'{arrays}' WHERE sample_id = 0").problems[0]


def test_a_ledger_that_counts_twice_is_a_problem(book):
    change = "UPDATE meta SET value = json_set(value, '$.trained', json_extract(value, '$.trained') + 6) WHERE key = 'ledger'"
    problems = book.tampered(change).problems
    assert any("trained = 24, the journal's rows come to 18" in problem for problem in problems), problems
    assert any("does not close" in problem for problem in problems)


def test_staleness_and_gaps_in_the_steps_are_problems(book):
    assert (
        "1 versions late"
        in book.tampered("UPDATE samples SET segments = '[[0, 3]]' WHERE sample_id = 4096").problems[0]
    )
    assert (
        "-1 versions late" in book.tampered("UPDATE samples SET segments = '[[1, 3]]' WHERE sample_id = 0").problems[0]
    )
    assert "committed steps are [1, 3]" in book.tampered("UPDATE steps SET committed_at = NULL WHERE step = 2").problems


def test_a_group_that_was_admitted_for_nothing_is_a_problem(book):
    values = "(9, 9, 0, 3, 'open')"
    verdict = book.tampered(
        f"INSERT INTO groups (group_id, draw, task_index, admitted_version, status) VALUES {values}"
    )
    assert any("admitted for nothing" in problem for problem in verdict.problems)


def test_arrays_are_those_of_a_sample():
    assert set(_arrays()) == set(m.SampleResult.arrays)
