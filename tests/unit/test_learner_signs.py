"""Signs of life: who is behind, and where a rank is."""

from __future__ import annotations

import dataclasses
import sys
import threading

import torch.distributed as dist

from common.errors import TrainingError
from common.waits import WaitTable
from services.learner import signs as module
from services.learner.signs import SILENT_S, Progress, Sign, Signs, Word, behind, whereabouts
from tests.polling import block_until


def sign(rank: int, **changes) -> Sign:
    """Of a rank that sits in a collective of phase 5."""
    usual = Sign(
        rank, 5, "train step 7", "all_reduce of f (x.py:1)", collective=True, since_s=3.0, host="h", pid=10 + rank
    )
    return dataclasses.replace(usual, **changes)


def late(*signs: Sign) -> list[int]:
    """The ranks that are behind."""
    return [one.rank for one in behind(signs)]


def test_a_silent_rank_is_behind_whatever_it_said_last() -> None:
    assert late(sign(0), sign(1), sign(2, age_s=SILENT_S + 1)) == [2]
    assert late(sign(0), sign(1, phase=4), sign(2, age_s=SILENT_S + 1, phase=9)) == [2]


def test_of_ranks_in_one_phase_those_that_work_are_behind_those_in_a_collective() -> None:
    assert late(sign(0), sign(1, collective=False), sign(2)) == [1]
    assert late(sign(0, collective=False), sign(1)) == [0]


def test_ranks_of_an_earlier_phase_are_behind_and_of_them_those_that_work() -> None:
    assert late(sign(0, phase=6), sign(1), sign(2)) == [1, 2]
    assert late(sign(0, phase=6), sign(1), sign(2, collective=False)) == [2]
    assert late(sign(0, phase=6, collective=False), sign(1)) == [1]


def test_nobody_is_behind_where_all_work_or_all_sit_in_the_same_phase() -> None:
    assert late(sign(0), sign(1)) == []
    assert late(sign(0, collective=False), sign(1, collective=False)) == []
    assert late() == [], "before rank 0 has looked"


def test_a_word_names_the_ranks_and_what_they_are_at_and_travels() -> None:
    word = Word.of([sign(1, age_s=62.0, doing="train step 7, loss of micro-batch 3 of 8"), sign(2, collective=False)])
    assert word.on == "rank 1, rank 2"
    assert word.text == (
        "rank 1 (pid 11 on h) gives no sign since 62 s, when it was at train step 7, loss of micro-batch 3 of 8, in all_reduce of f "
        "(x.py:1); rank 2 (pid 12 on h) is at train step 7 since 3 s, in all_reduce of f (x.py:1)"
    )
    assert Word.decoded(word.encoded.encode()) == word


def test_progress_counts_phases_and_not_their_parts() -> None:
    progress = Progress()
    progress.phase("train step 7")
    progress.part("loss of micro-batch 1 of 2")
    progress.part("loss of micro-batch 2 of 2")
    assert progress.now[:3] == (1, "train step 7", "loss of micro-batch 2 of 2")
    progress.phase("commit of step 7")
    assert progress.now[:3] == (2, "commit of step 7", "")


def test_a_threads_place_is_its_innermost_function_outside_of_torch() -> None:
    begun, done = threading.Event(), threading.Event()

    def work_of_ours() -> None:
        begun.set()
        done.wait()

    thread = threading.Thread(target=work_of_ours)
    thread.start()
    begun.wait()
    frame = sys._current_frames()[thread.ident or 0]
    while frame.f_code.co_name != "work_of_ours":  # Event's own
        frame = frame.f_back
    place, collective = whereabouts(frame)
    done.set()
    thread.join()
    assert place.startswith("work_of_ours (test_learner_signs.py:")
    assert not collective
    assert whereabouts(None) == ("no code of ours", False)


def test_a_call_of_torch_distributed_is_named_with_who_called_it(tmp_path) -> None:
    seen = []
    calls = {"look": lambda: seen.append(whereabouts(sys._getframe(1)))}
    for file, code in {
        "site/torch/distributed/distributed_c10d.py": "def all_reduce(x): look()",
        "site/torch/distributed/c10d_logger.py": "def wrapper(x): all_reduce(x)",
        "ours/policy.py": "def sums():\n  wrapper(1)",
    }.items():
        exec(compile(code, str(tmp_path / file), "exec"), calls)
    calls["sums"]()
    assert seen == [("all_reduce of sums (policy.py:2)", True)]


def test_a_silent_rank_is_a_wait_of_rank_0_until_it_is_back_and_a_failure_reaches_the_others(monkeypatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.05)
    monkeypatch.setattr(module, "SILENT_S", 0.5)
    store, waits, lost = dist.HashStore(), WaitTable(), []

    def start(rank: int) -> Signs:
        progress = Progress()
        progress.phase(f"step {rank}")
        return Signs(store, progress, waits, rank=rank, size=2, timeout_s=60, lose=lost.append)

    zero, one = start(0), start(1)
    zero.start()
    one.start()
    one.close()
    block_until(
        lambda: [(wait.what, wait.on) for wait in waits.snapshot()] == [("step 0 (last sign: step 1)", "rank 1")]
    )
    assert zero.word.on == "rank 1"
    assert "gives no sign since" in zero.word.text
    back = start(1)
    back.start()
    block_until(lambda: not waits.snapshot())
    assert lost == []
    back.close()
    back.tell_failed(TrainingError("the loss is nan"))
    block_until(lambda: lost == ["rank 1: the loss is nan"])
    zero.close()
