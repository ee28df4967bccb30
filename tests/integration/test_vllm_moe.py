"""Real vLLM with a mixture of experts: the routed_experts that it tells are those of its tokens, and a weight update changes all experts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.moe_routing import interpreted_env, make_model

HERE = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.timeout(1800)  # for what never ends: the kernels are interpreted
def test_routes_and_log_probs_are_those_of_the_weights_that_made_them(tmp_path: Path) -> None:
    model, out = make_model(tmp_path / "model"), tmp_path / "seen.json"
    done = subprocess.run(
        [sys.executable, HERE / "vllm_moe_world.py", model, out],
        env=interpreted_env(),
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert out.exists(), f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    seen = json.loads(out.read_text())
    crossed = [one for one in seen["over"] if one["versions"] == [0, 1]]
    assert crossed, "no request was in flight over the update"
    for one in [*seen["before"], *crossed, *seen["after"]]:
        num_prompt, num_completion = one["tokens"]
        assert one["shape"] == [num_prompt + num_completion - 1, 4, 4]
        assert one["gap"] < 1e-3
        assert one["other_experts"] < 0.02
