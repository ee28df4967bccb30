"""A run's journal read by a stranger: everything that a post-mortem wants, beside its writer, and of a damaged one what is left."""

import asyncio
import sqlite3

import numpy as np
import pytest
from coordinator_desk import Desk, of

from protocol import messages as m
from services.journal_reader import read_journal


@pytest.fixture
def desk(tmp_path):
    desk = Desk(tmp_path)
    yield desk
    desk.journal.close()


async def test_open_groups_are_there_with_their_samples_while_the_journal_is_open(desk, tmp_path):
    leases = of(m.GenerateLease, desk.join("rollout", "gen"))
    desk.join("reward", "judge")
    for to, score in of(m.ScoreLease, desk.sample("gen#1", leases[1][1], 0)):
        desk.score(to, score, m.JudgeResult(verdict="accepted", reward=1.0))
    await asyncio.wait_for(desk.journal.submit(desk.records), 60)
    facts = read_journal(tmp_path / "j.sqlite")
    assert facts.problems == []
    assert facts.readable
    assert facts.groups == {"open": len(leases)}
    counts = {group["group_id"]: (group["samples"], group["judged"]) for group in facts.oldest_open}
    assert counts[leases[1][1].group_id] == (1, 1)
    assert set(counts.values()) == {(0, 0), (1, 1)}
    assert facts.ledger["groups_admitted"] == len(leases)
    assert facts.meta["run_id"] == "r"


def test_damage_costs_only_what_is_on_it(desk, tmp_path):
    path = tmp_path / "other.sqlite"
    with sqlite3.connect(path) as db:
        db.executescript("CREATE TABLE meta (key TEXT, value TEXT); INSERT INTO meta VALUES ('run_id', 'r');")
    facts = read_journal(path)
    db.close()
    assert facts.meta == {"run_id": "r"}
    assert len(facts.problems) == 4
    path.write_bytes(np.random.default_rng(0).bytes(10_000))
    assert not read_journal(path).readable
    assert read_journal(path).problems
    assert "no journal" in read_journal(tmp_path / "none.sqlite").problems[0]
