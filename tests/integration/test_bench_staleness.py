"""The staleness study does what it says: samples of exactly the age asked for, and the engine's log-probs are the trainer's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import staleness


def test_samples_have_exactly_the_age_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"GROUPS_PER_STEP": 2, "EVAL_INTERVAL": 9, "EVAL_SAMPLES": 1, "FINAL_SAMPLES": 1}.items():
        monkeypatch.setattr(staleness, name, value)
    monkeypatch.setattr(staleness, "LR", 5e-3)
    staleness.run_all(tmp_path, staleness=[1], objectives=["decoupled"], seeds=[3], num_steps=3)
    rows = [json.loads(line) for line in (tmp_path / "decoupled-k1-seed3.jsonl").read_text().splitlines()]
    assert [row.get("age") for row in rows] == [0, 1, 1, None]
    assert ["heldout" in row for row in rows] == [True, False, False, True]
    trained = [row for row in rows if "loss" in row]
    assert len(trained) >= 2
    for row in trained:  # the weights at hand sampled the first step alone
        assert (row["logprob_gap_max"] < 1e-3) == (row["age"] == 0)
    assert "| decoupled | 1 | 1 |" in staleness.table(staleness.read_runs(tmp_path))


def test_a_run_that_another_process_is_at_is_not_begun_again(tmp_path: Path) -> None:
    (tmp_path / "clipped-k0-seed0.partial").touch()
    with pytest.raises(FileExistsError):
        staleness.run_all(tmp_path, staleness=[0], objectives=["clipped"], seeds=[0], num_steps=1)
