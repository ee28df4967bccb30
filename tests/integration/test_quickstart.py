"""The quickstart itself, shortened: real vLLM, real Megatron-Core, the real sandbox, all as processes of ``forebay up``."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.processes import free_port

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def run_up(tmp_path, *overrides):
    settings = [f"run.dir={tmp_path}", f"run.address=tcp://127.0.0.1:{free_port()}", *overrides]
    command = [sys.executable, "-m", "services.cli", "up", "deploy/configs/quickstart.toml"]
    command += [part for setting in settings for part in ("--set", setting)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "COLUMNS": "120"}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run_dir,) = tmp_path.glob("quickstart-*")
    return run_dir, json.loads((run_dir / "summary.json").read_text()), done.stdout


def test_every_pipeline_stage_reaches_the_running_engine(tmp_path):
    """Two stages are two senders; a stage that is lost or sent twice shows as a log-prob gap at the next step."""
    run_dir, summary, output = run_up(
        tmp_path,
        "coordinator.max_steps=4",
        "coordinator.groups_per_step=6",
        "coordinator.bypass_window=0",
        "up.learner_procs=2",
        "up.reward_nodes=1",
        "learner.parallel.pipeline=2",
    )
    assert summary["state"] == "finished"
    assert summary["version"] == 4
    assert [sync["version"] for sync in summary["weight_updates"]] == [1, 2, 3, 4]
    assert all(row["weight_update/acked"] == 1 and row["weight_update/failed"] == 0 for row in summary["steps"])
    gaps = [row["train/logprob_gap_mean"] for row in summary["steps"]]
    assert gaps[0] < 1e-3, "engine and trainer differ although both have the weights of the checkpoint"
    assert max(gaps) < 0.1, gaps
    ledger = summary["ledger"]
    kinds = ("trained", "buffered", "in_flight", "filtered", "failed", "duplicate", "lost")
    assert ledger["generated"] == sum(ledger[kind] for kind in kinds)
    assert "closes: every generated token and every group is accounted for" in output
    exported = json.loads((run_dir / "export" / "config.json").read_text())
    assert exported["model_type"] == "llama"


def test_the_trained_checkpoint_loads_in_plain_transformers(tmp_path):
    run_dir, summary, _ = run_up(
        tmp_path, "coordinator.max_steps=2", "coordinator.groups_per_step=4", "coordinator.max_staleness=0",
        "coordinator.bypass_window=0", "up.reward_nodes=1",
    )  # fmt: skip
    assert summary["staleness_counts"] == {"0": 64}, "max_staleness = 0 is synchronous, on-policy training"
    code = (
        "import sys, transformers as t; m = t.AutoModelForCausalLM.from_pretrained(sys.argv[1]); "
        "k = t.AutoTokenizer.from_pretrained(sys.argv[1]); "
        "ids = k.apply_chat_template([{'role': 'user', 'content': 'Write a function load_case(x) that returns x minus 5.'}], "
        "add_generation_prompt=True, return_tensors='pt', return_dict=True); "
        "print(k.decode(m.generate(**ids, max_new_tokens=40, do_sample=False)[0]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run_dir / "export")], capture_output=True, text=True, timeout=120
    )
    assert "def load_case(x):" in done.stdout, done.stdout + done.stderr
