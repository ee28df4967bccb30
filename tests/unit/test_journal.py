"""The journal: what comes back after a restart, a full disk, and files that can't be used."""

import asyncio
import sqlite3

import numpy as np
import pytest

from common.errors import ConfigError, ForebayError, InvariantError
from protocol.verdicts import JudgeResult, Verdict
from protocol.versions import Segment
from services.coordinator.config import CoordinatorConfig
from services.coordinator.core.admission import TaskCursor
from services.coordinator.core.batches import make_batch
from services.coordinator.core.effects import Effects, Record
from services.coordinator.core.groups import Sample
from services.coordinator.core.pool import Pool
from services.coordinator.journal import Journal
from services.coordinator.sample_arrays import NAMES, array_parts, unpack_arrays

GOOD = JudgeResult(verdict=Verdict.ACCEPTED, reward=1.0)
BAD = JudgeResult(verdict=Verdict.WRONG_ANSWER, reward=0.0)
BROKEN = JudgeResult(verdict=Verdict.INFRA_ERROR, message="no disk")


class Life:
    """A pool and its journal, from one start of a coordinator to the next."""

    def __init__(self, folder, **changes):
        values = {"tasks": "t", "group_size": 2, "groups_per_step": 2, "max_steps": 50, "max_staleness": 2} | changes
        self.journal = Journal(folder / "journal.sqlite", run_id="r", disk_timeout_s=changes.get("disk_timeout_s", 5))
        config = CoordinatorConfig(**values)
        cursor = TaskCursor(6, seed=0, shuffle=False, max_epochs=config.max_epochs)
        self.pool = Pool(config, cursor, self.journal.state, Effects())

    def records(self):
        self.pool.flush()
        return self.pool._effects.take().records

    async def write(self):
        await asyncio.wait_for(self.journal.submit(self.records()), 20)

    def add(self, group_id, index, tokens=3, **more):
        arrays = {
            "prompt_ids": np.arange(5, dtype=np.int32),
            "completion_ids": np.arange(tokens, dtype=np.int32),
            "logprobs": np.full(tokens, -0.5, np.float32),
        }
        segments = [Segment(version=self.pool.version, num_tokens=tokens)]
        return self.pool.add_sample(group_id, Sample(index, "x", "stop", segments, arrays | more))

    def finish(self, group_id, results=(GOOD, BAD)):
        for index, result in enumerate(results):
            self.add(group_id, index)
            self.pool.add_result(group_id, index, result)

    def train(self, step, replay_from=-1):
        for group_id in sorted(self.pool.groups)[:2]:
            self.finish(group_id)
        batch = self.pool.take_batch(step)
        self.pool.commit(step, {"loss": 1.0})
        self.pool.forget(replay_from=replay_from)
        return [group.group_id for group in batch]


@pytest.fixture
async def restarted(tmp_path):
    """``await restarted(life, **changes)``: all is written, the process dies, another one starts."""
    lives = []

    async def restart(life=None, **changes):
        if life is not None:
            await life.write()
            life.journal.close()
        lives.append(Life(tmp_path, **changes))
        lives[-1].pool.admit()
        return lives[-1]

    yield restart
    lives[-1].journal.close()


async def test_tries_of_a_group_and_of_a_sample_are_not_forgotten_by_a_restart(restarted):
    life = await restarted()
    life.pool.generation_failed(0, "boom", node_id="a")
    life.pool.generation_interrupted(0, died="no heartbeat")
    life.add(1, 0)
    life.pool.add_result(1, 0, BROKEN)
    life.pool.scoring_interrupted(1, 0, died="no heartbeat")
    life = await restarted(life)
    group, sample = life.pool.groups[0], life.pool.groups[1].samples[0]
    assert (group.generate_attempts, group.deaths) == (1, 1)
    assert (sample.score_attempts, sample.deaths) == (1, 1)
    assert life.pool.generation_failed(0, "boom")
    assert not life.pool.generation_failed(0, "boom"), "the third try was the last"


async def test_a_task_that_is_out_stays_out_after_a_restart_and_its_place_is_filled(restarted):
    life = await restarted(groups_per_step=1, max_staleness=0)
    assert [group.task_index for group in life.pool.groups.values()] == [0]
    life.pool.generation_failed(0, "200 tokens, run.max_prompt_tokens is 64", permanent=True)
    life = await restarted(life, groups_per_step=1, max_staleness=0)
    assert life.pool.quarantine.tasks == {0: "200 tokens, run.max_prompt_tokens is 64"}
    drawn = []
    for step in range(1, 12):
        drawn += [group.task_index for group in life.pool.groups.values()]
        life.finish(min(life.pool.groups))
        life.pool.take_batch(step)
        life.pool.commit(step, {})
        life.pool.admit()
    assert drawn[:6] == [1, 2, 3, 4, 5, 1]


async def test_failures_of_a_task_that_recovers_are_forgotten(restarted):
    life = await restarted(generate_attempts=1)
    life.pool.generation_failed(0, "boom")
    assert life.pool.quarantine.failures == {0: 1}
    life = await restarted(life, generate_attempts=1)
    assert life.pool.quarantine.failures == {0: 1}
    group = next(group for group in life.pool.groups.values() if group.task_index == 0)
    life.finish(group.group_id)
    life = await restarted(life)
    assert life.pool.quarantine.failures == {}
    assert life.pool.quarantine.tasks == {}


async def test_how_often_a_group_was_overtaken_survives(restarted):
    settings = {"bypass_window": 4, "max_staleness": 3}
    life = await restarted(**settings)
    for group_id in (1, 2):
        life.finish(group_id)
    assert [group.group_id for group in life.pool.take_batch(1)] == [1, 2]
    life = await restarted(life, **settings)
    assert life.pool.groups[0].overtaken == 2


async def test_a_batch_that_was_handed_out_is_the_same_after_a_restart(restarted):
    life = await restarted()
    for group_id in (0, 1):
        life.finish(group_id)
    first = [group.group_id for group in life.pool.take_batch(1)]
    life = await restarted(life)
    life.finish(2)
    assert [group.group_id for group in life.pool.take_batch(1)] == first
    assert life.pool.staleness_counts == {0: 4}


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
async def test_routes_come_back_as_they_were_and_go_into_the_batch_in_order(restarted, dtype):
    routed_experts = np.arange(7 * 3 * 2, dtype=dtype).reshape(7, 3, 2)  # 5 + 3 tokens but the last
    life = await restarted()
    for group_id in (0, 1):
        for index, result in enumerate((GOOD, BAD)):
            life.add(group_id, index, routed_experts=routed_experts + 2 * group_id + index)
            life.pool.add_result(group_id, index, result)
    life = await restarted(life)
    _, arrays = make_batch(1, life.pool.take_batch(1), replay=False)
    assert arrays["routed_experts"].dtype == dtype
    assert np.array_equal(arrays["routed_experts"], np.concatenate([routed_experts + n for n in range(4)]))
    assert arrays["logprobs"].tolist() == [-0.5] * 12


def test_a_blob_of_too_few_bytes_is_no_sample():
    arrays = {name: np.zeros(2, dtype) for name, dtype in zip(NAMES, ("<i4", "<i4", "<f4"), strict=True)}
    blob = b"".join(array_parts(arrays))
    assert "routed_experts" not in unpack_arrays(blob, num_prompt=2, num_completion=2)
    with pytest.raises(ValueError, match="buffer is smaller"):
        unpack_arrays(blob[:-1], num_prompt=2, num_completion=2)
    with pytest.raises(ValueError, match=r"25 bytes of arrays for 2 \+ 2 tokens"):
        unpack_arrays(blob + b"x", num_prompt=2, num_completion=2)


async def test_samples_that_no_replay_needs_leave_and_all_others_stay(restarted):
    life = await restarted()
    for step in range(1, 9):
        life.train(step, replay_from=max(-1, step - 3))
        life.pool.admit()
    life = await restarted(life)
    assert life.pool.first_kept_step == 6
    for step in (6, 7, 8):
        assert [len(group.samples) for group in life.journal.batch(step)] == [2, 2]
    assert [len(group.samples) for group in life.journal.batch(5)] == [0, 0]
    assert life.pool.staleness_counts.total() == 8 * 4, "what is known of them stays"
    assert life.pool.ledger.trained == 8 * 4 * 3


async def test_a_group_that_is_still_open_keeps_all_younger_samples(restarted):
    life = await restarted(max_staleness=4, bypass_window=4)
    for group_id in range(1, 3):
        life.finish(group_id)
    life.pool.take_batch(1)
    life.pool.commit(1, {})
    life.pool.forget(replay_from=1)
    life.add(0, 0)
    life = await restarted(life, max_staleness=4, bypass_window=4)
    assert sorted(life.pool.groups[0].samples) == [0]


async def test_a_full_disk_is_waited_out_and_nothing_is_acknowledged_meanwhile(restarted):
    life = await restarted()
    await life.write()
    pages = life.journal._db.execute("PRAGMA page_count").fetchone()[0]
    life.journal._db.execute(f"PRAGMA max_page_count = {pages + 1}")  # SQLite's own way to a full disk
    for index in range(2):
        life.add(0, index, tokens=100_000)
    durable = life.journal.submit(life.records())
    while life.journal.full_since is None:  # noqa: ASYNC110 (of another thread)
        await asyncio.sleep(0.01)
    assert not durable.done()
    life.journal._db.execute("PRAGMA max_page_count = 1000000")
    await asyncio.wait_for(durable, 60)
    assert life.journal.full_since is None
    life = await restarted(life)
    assert sorted(life.pool.groups[0].samples) == [0, 1]


async def test_a_disk_that_stays_full_ends_the_run_and_keeps_what_was_acknowledged(restarted):
    life = await restarted(disk_timeout_s=0.6)
    life.add(0, 0)
    await life.write()
    pages = life.journal._db.execute("PRAGMA page_count").fetchone()[0]
    life.journal._db.execute(f"PRAGMA max_page_count = {pages}")
    life.add(0, 1, tokens=100_000)
    with pytest.raises(ForebayError, match=r"can't be written: .*full.*free\s+space"):
        await life.write()
    life.journal.close()
    life = await restarted()
    assert sorted(life.pool.groups[0].samples) == [0]


def journal_file(folder, num_groups=40):
    """A journal of some pages, closed."""
    life = Life(folder, groups_per_step=num_groups, max_staleness=0)
    life.pool.admit()
    for group_id in range(num_groups):
        life.add(group_id, 0, tokens=3000)
    life.journal._write([(life.records(), None)])
    life.journal.close()
    return folder / "journal.sqlite"


def refusal(path, run_id="r", fixed=None):
    """Why it is not opened, or not loaded; its bytes are as they were."""
    before = path.read_bytes()
    with pytest.raises(ConfigError) as caught:
        Journal(path, run_id=run_id, fixed=fixed)
    assert path.read_bytes() == before
    return str(caught.value)


async def test_a_truncated_journal_is_refused_and_left_as_it_is(tmp_path):
    path = journal_file(tmp_path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert "damaged" in refusal(path)


async def test_a_journal_with_flipped_bytes_in_its_tokens_is_refused(tmp_path):
    path = journal_file(tmp_path)
    tokens = np.arange(1000, 1010, dtype=np.int32).tobytes()
    flipped = bytearray(tokens)
    flipped[4] ^= 0x40
    path.write_bytes(path.read_bytes().replace(tokens, flipped))  # in what is deleted, too
    assert "fail their checksum" in refusal(path)


async def test_a_journal_with_a_torn_page_is_refused(tmp_path):
    path = journal_file(tmp_path)
    data = bytearray(path.read_bytes())
    with sqlite3.connect(path) as db:
        [(root,)] = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'groups'").fetchall()
    db.close()
    data = bytearray(path.read_bytes())
    data[(root - 1) * 16384 : root * 16384] = b"\xff" * 16384
    path.write_bytes(data)
    assert "damaged" in refusal(path)


async def test_something_else_under_its_name_is_refused(tmp_path):
    path = tmp_path / "journal.sqlite"
    path.write_bytes(b"not a database, but somebody's bytes" * 100)
    assert "damaged" in refusal(path)
    path.unlink()
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE meta (key TEXT, value TEXT)")
        db.execute("INSERT INTO meta VALUES ('run_id', 'r'), ('schema', '1')")
    db.close()
    assert "schema '1'; this is run 'r', schema 2" in refusal(path)


async def test_a_journal_of_another_run_is_refused(tmp_path):
    assert "is of run 'r'" in refusal(journal_file(tmp_path), run_id="other")


async def test_settings_that_a_run_was_begun_with_can_not_change(tmp_path):
    path = tmp_path / "journal.sqlite"
    Journal(path, run_id="r", fixed={"run.seed": 1, "coordinator.group_size": 8}).close()
    text = refusal(path, fixed={"run.seed": 1, "coordinator.group_size": 4})
    assert "coordinator.group_size was 8 and is 4 now" in text
    assert "run.seed" not in text


async def test_a_write_that_is_cut_short_leaves_the_transactions_before_it(tmp_path):
    """A power cut in the middle of the last write: the log's tail is torn."""
    life = Life(tmp_path)
    life.pool.admit()
    life.add(0, 0)
    life.journal._write([(life.records(), None)])
    whole = (tmp_path / "journal.sqlite-wal").stat().st_size
    life.add(0, 1, tokens=5000)
    life.journal._write([(life.records(), None)])
    log = (tmp_path / "journal.sqlite-wal").read_bytes()
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "journal.sqlite").write_bytes((tmp_path / "journal.sqlite").read_bytes())
    (copy / "journal.sqlite-wal").write_bytes(log[: whole + (len(log) - whole) // 2])
    life.journal.close()
    again = Life(copy)
    assert sorted(again.pool.groups[0].samples) == [0]
    again.journal.close()


async def test_an_unknown_record_is_no_silent_loss(tmp_path):
    journal = Journal(tmp_path / "journal.sqlite", run_id="r")
    with pytest.raises(InvariantError, match="no such kind"):
        await journal.submit([Record("no such kind", (1,))])
    journal.close()


def test_a_folder_that_can_not_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=rf"{tmp_path}/file/run can't be written: Not a directory.*run\.dir"):
        Journal(tmp_path / "file" / "run" / "journal.sqlite", run_id="r")
