"""How far engine and trainer are apart on a mixture of experts, and what routing replay does to that.

    python -m bench.moe_routing [--engine bfloat16 float32] [--trainer float32 bfloat16] [--samples 32] [--out FILE]

A random Qwen3-MoE (8 layers, 64 experts, 8 of them for each token) is sampled by real vLLM and trained on by our Megatron policy at a
learning rate of 0, with and without the engine's routed_experts. For each pair of precisions: the gap of the log-probs in nats per token, mean and
largest; the largest ratio; and the share of (token, layer) in which the two would choose other experts. The model is untrained, so its
logits are nearer to each other than a trained one's: the share is an upper end. Without a GPU vLLM's kernels run in Triton's
interpreter (``interpreted_triton``): their speed is no figure, their numbers are.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.byte_tokenizer import save_byte_tokenizer

NAMES = ("prompt_ids", "completion_ids", "logprobs", "routed_experts")
ROOT = Path(__file__).resolve().parents[1]
PROMPTS = (
    "Write add(a, b).",
    "Sort a list without sorted().",
    "Is n a prime?",
    "Count the vowels of a text, in one pass.",
)
LARGE = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 64,
}


def interpreted_env() -> dict[str, str]:
    """The environment of a Python process in which vLLM can tell its experts: on a machine without a GPU, by Triton's interpreter."""
    import torch

    path = [str(ROOT)] if torch.cuda.is_available() else [str(ROOT), str(ROOT / "bench" / "interpreted_triton")]
    more = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    return {**os.environ, **more, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


def make_model(folder: Path, **sizes: Any) -> Path:
    """A random Qwen3-MoE checkpoint, with a byte tokenizer and a chat template. ``sizes``: of the config, beside small ones."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    end_of_message = save_byte_tokenizer(folder)
    torch.manual_seed(0)
    small = {"hidden_size": 128, "num_hidden_layers": 4, "num_experts": 16, "num_experts_per_tok": 4}
    config = Qwen3MoeConfig(
        vocab_size=320,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        norm_topk_prob=True,
        eos_token_id=end_of_message,
        bos_token_id=None,
        **{"moe_intermediate_size": 64} | small | sizes,
    )
    model = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.ndim > 1 else parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    return folder


async def _sample(model: Path, dtype: str, num_samples: int, num_tokens: int) -> list[dict[str, Any]]:
    """Arrays of completions by vLLM, as ``messages.SampleResult`` has them."""
    from protocol.config import RunConfig
    from protocol.messages import Sampling
    from services.rollout.config import RolloutConfig
    from services.rollout.vllm_engine import VllmEngine

    run = RunConfig(id="moe", model=model, max_prompt_tokens=128, max_completion_tokens=num_tokens, routing_replay=True)
    engine = VllmEngine(run, RolloutConfig.model_validate({"dtype": dtype, "num_threads": 1, "max_num_seqs": 64}))
    await engine.start()
    try:
        each, sampling = num_samples // len(PROMPTS), Sampling(max_tokens=num_tokens)

        async def complete(prompt: str) -> list[dict[str, Any]]:
            return [
                {name: getattr(done, name) for name in NAMES}
                async for done in engine.generate(prompt, range(each), sampling, 0)
            ]

        return [sample for group in await asyncio.gather(*map(complete, PROMPTS)) for sample in group]
    finally:
        await engine.close()


def _sample_elsewhere(model: Path, dtype: str, num_samples: int, num_tokens: int, folder: Path) -> list[dict[str, Any]]:
    """``_sample`` in a process whose environment suits it."""
    path = folder / f"{dtype}.npz"
    words = [sys.executable, "-m", "bench.moe_routing", "--sample", str(model), dtype, str(path)]
    done = subprocess.run(
        [*words, "--samples", str(num_samples), "--tokens", str(num_tokens)],
        env=interpreted_env(),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"vLLM in {dtype} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    with np.load(path) as found:
        count = len(found.files) // len(NAMES)
        return [{name: found[f"{name}-{i}"] for name in NAMES} for i in range(count)]


def measure(model: Path, samples: list[dict[str, Any]], dtype: str, *, replay: bool) -> Any:
    """``StepStats`` of a step on the samples that changes nothing."""
    from services.learner.config import LearnerConfig
    from services.learner.megatron.policy import MegatronPolicy
    from services.learner.packing import TrainSample

    config = {
        "dtype": dtype,
        "max_tokens_per_microbatch": 2048,
        "logprob_gap_alarm": None,
        "optimizer": {"lr": 0.0, "allow_zero_lr": True},
    }
    policy = MegatronPolicy(LearnerConfig.model_validate(config), model, seed=0, deterministic=False)
    batch = [TrainSample(**sample | {"advantage": 1.0}) for sample in samples]
    stats = policy.train_step(batch, total_steps_done=0)
    if replay:
        return stats
    plain = [TrainSample(s["prompt_ids"], s["completion_ids"], s["logprobs"], 1.0) for s in samples]
    return policy.train_step(plain, total_steps_done=1)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", nargs="+", default=["bfloat16", "float32"], help="precisions of vLLM")
    parser.add_argument("--trainer", nargs="+", default=["float32", "bfloat16"], help="precisions of the learner")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48, help="longest completion")
    parser.add_argument("--out", type=Path, help="the table, as Markdown")
    parser.add_argument("--sample", nargs=3, metavar=("MODEL", "DTYPE", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sample:
        model, dtype, path = args.sample
        found = asyncio.run(_sample(Path(model), dtype, args.samples, args.tokens))
        np.savez(path, **{f"{name}-{i}": array for i, sample in enumerate(found) for name, array in sample.items()})
        return
    rows = [
        "| engine | trainer | routed_experts | mean gap | largest gap | largest ratio | other experts |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory(prefix="forebay-moe-") as name:
        model = make_model(Path(name) / "model", **LARGE)
        for engine in args.engine:
            samples = _sample_elsewhere(model, engine, args.samples, args.tokens, Path(name))
            print(f"{engine}: {len(samples)} samples, {sum(len(s['completion_ids']) for s in samples)} tokens")
            for trainer in args.trainer:
                for replay in (False, True):
                    stats = measure(model, samples, trainer, replay=replay)
                    changed = f"{stats.routing_changed_share:.2%}" if replay else ""
                    rows.append(
                        f"| {engine} | {trainer} | {'replayed' if replay else 'own'} | {stats.logprob_gap_mean:.2g} "
                        f"| {stats.logprob_gap_max:.2g} | {stats.ratio_max:.3f} | {changed} |"
                    )
                    print(rows[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
