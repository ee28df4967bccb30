"""Reward against staleness: the quickstart's task, trained on samples that are exactly k versions old, by two objectives.

    python -m bench.staleness --out runs/staleness                       # all runs, one after the other, on one core
    python -m bench.staleness --out runs/staleness --report bench/results/staleness.png   # table and plot of those that ended; needs matplotlib

One process does all of it, so that the age is exact: step n samples with the weights of version max(0, n - k), from a ring of the last
k + 1. What samples is transformers on the CPU with a key-value cache, what judges is the reward role's own judge with its sandbox,
and what trains is the learner's policy. Equal seeds draw equal tasks in equal order. Each run appends its steps to a file of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from protocol.tasks import Task, load_tasks
from services.learner.advantages import batch_advantages
from services.learner.config import LearnerConfig
from services.learner.megatron.policy import MegatronPolicy
from services.learner.packing import TrainSample
from services.reward.config import RewardConfig
from services.reward.pool import JudgePool

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "deploy/quickstart"
# As in deploy/configs/quickstart.toml, but for the mini-batches: with one the clip of the decoupled objective has nothing to cut.
GROUP_SIZE, GROUPS_PER_STEP, MAX_NEW_TOKENS, MAX_PROMPT_TOKENS, LR, MINIBATCHES = 8, 12, 72, 96, 4e-4, 2
STALENESS = (0, 1, 4, 16)
OBJECTIVES: dict[str, dict[str, Any]] = {
    "clipped": {},
    "decoupled": {"decoupled": True, "importance": "truncate", "importance_max": 5.0},
}
EVAL_INTERVAL, EVAL_SAMPLES, FINAL_SAMPLES = 10, 2, 8


class Sampler:
    """Samples completions at temperature 1 with given weights; keeps the log-probs of what it drew."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._generator = torch.Generator().manual_seed(seed)

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """Puts the weights of a version in place: every tensor of the model but a tied head."""
        missing, unexpected = self.model.load_state_dict(weights, strict=False)
        if unexpected or set(missing) - {"lm_head.weight"}:
            raise RuntimeError(f"The policy's names are not the model's: {missing} are missing, {unexpected} too many.")

    def prompt_ids(self, task: Task) -> list[int]:
        """The prompt in the model's chat template, as the rollout role makes it."""
        chat = [{"role": "user", "content": task.prompt}]
        ids = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        return list(ids)

    @torch.no_grad()
    def sample(self, prompts: Sequence[list[int]]) -> list[tuple[list[int], list[float]]]:
        """(ids with the end token where it came, their log-probs), one per prompt."""
        width, eos = max(map(len, prompts)), self.tokenizer.eos_token_id
        ids = torch.tensor([[eos] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        positions, cache = (mask.cumsum(-1) - 1).clamp(min=0), None
        done: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        alive = list(range(len(prompts)))
        for _ in range(MAX_NEW_TOKENS):
            out = self.model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logprobs = out.logits[:, -1].float().log_softmax(-1)
            ids = torch.multinomial(logprobs.exp(), 1, generator=self._generator)
            drawn = logprobs.gather(1, ids)[:, 0].tolist()
            for row, token, logprob in zip(alive, ids[:, 0].tolist(), drawn, strict=True):
                done[row][0].append(token)
                done[row][1].append(logprob)
            keep = (ids[:, 0] != eos).nonzero()[:, 0]
            if not len(keep):
                break
            if len(keep) < len(alive):
                alive = [alive[i] for i in keep.tolist()]
                cache.batch_select_indices(keep)
                ids, mask, positions = ids[keep], mask[keep], positions[keep]
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            positions = positions[:, -1:] + 1
        return done


class Study:
    """One run: one objective at one staleness with one seed."""

    def __init__(self, objective: str, staleness: int, seed: int, pool: JudgePool) -> None:
        self.staleness, self.pool = staleness, pool
        config = LearnerConfig.model_validate(
            {
                "num_threads": 1,
                "logprob_gap_alarm": None,
                "max_tokens_per_microbatch": 4096,
                "optimizer": {"lr": LR},
                "objective": {"minibatches": MINIBATCHES, **OBJECTIVES[objective]},
            }
        )
        self.objective = config.objective
        self.policy = MegatronPolicy(config, ASSETS / "model", seed=seed, deterministic=False)
        self.sampler = Sampler(ASSETS / "model", seed)
        self.train, self.heldout = (load_tasks(ASSETS / f"tasks_{name}.jsonl") for name in ("train", "heldout"))
        self._rng = np.random.default_rng(seed)
        self._ring = deque([self._weights()], maxlen=staleness + 1)

    def steps(self, num_steps: int) -> Iterator[dict[str, Any]]:
        """One row a step; a row has ``heldout`` where the weights *before* that step were measured on the held-out tasks."""
        for step in range(num_steps):
            row: dict[str, Any] = {"step": step}
            if step % EVAL_INTERVAL == 0:
                row["heldout"] = self._heldout(EVAL_SAMPLES)
            started = time.perf_counter()
            self.sampler.load(self._ring[0])
            row |= self._train(step) | {"age": len(self._ring) - 1, "step_s": time.perf_counter() - started}
            self._ring.append(self._weights())
            yield row
        yield {"step": num_steps, "heldout": self._heldout(FINAL_SAMPLES)}

    def _train(self, step: int) -> dict[str, Any]:
        chosen = self._rng.choice(len(self.train), GROUPS_PER_STEP, replace=False)
        tasks = [self.train[i] for i in chosen for _ in range(GROUP_SIZE)]
        prompts, completions, rewards = self._judged(tasks)
        groups = rewards.reshape(GROUPS_PER_STEP, GROUP_SIZE)
        signal = [group for group in range(GROUPS_PER_STEP) if np.ptp(groups[group]) > 0]
        advantages = batch_advantages(
            [groups[group] for group in signal], kind=self.objective.advantage, std_floor=self.objective.std_floor
        )
        samples = []
        for group, values in zip(signal, advantages, strict=True):
            for i, advantage in enumerate(values.tolist(), start=group * GROUP_SIZE):
                ids, logprobs = completions[i]
                samples.append(
                    TrainSample(
                        np.asarray(prompts[i], np.int32),
                        np.asarray(ids, np.int32),
                        np.asarray(logprobs, np.float32),
                        advantage,
                    )
                )
        row = {"reward": float(rewards.mean()), "no_signal": 1.0 - len(signal) / GROUPS_PER_STEP}
        return row | (asdict(self.policy.train_step(samples, total_steps_done=step)) if samples else {})

    def _judged(self, tasks: Sequence[Task]) -> tuple[list[list[int]], list[tuple[list[int], list[float]]], np.ndarray]:
        prompts = [self.sampler.prompt_ids(task) for task in tasks]
        completions = self.sampler.sample(prompts)
        texts = [self.sampler.tokenizer.decode(ids, skip_special_tokens=True) for ids, _ in completions]
        verdicts = [self.pool.submit(text, task.tests) for text, task in zip(texts, tasks, strict=True)]
        rewards = [verdict.result().reward for verdict in verdicts]
        if None in rewards:
            raise RuntimeError(f"{rewards.count(None)} completions could not be judged.")
        return prompts, completions, np.asarray(rewards, np.float64)

    def _heldout(self, samples: int) -> float:
        """pass@1 of the newest weights."""
        self.sampler.load(self._ring[-1])
        return fmean(self._judged(self.heldout)[2].mean() for _ in range(samples))

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.policy.iter_hf_tensors()}


def run_all(
    out: Path, *, staleness: Sequence[int], objectives: Sequence[str], seeds: Sequence[int], num_steps: int
) -> None:
    """Every run that has no complete file in ``out`` yet."""
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    pool = JudgePool(RewardConfig(workers=1))
    pool.start()
    try:
        for seed in seeds:
            for k in staleness:
                for objective in objectives:
                    path = out / f"{objective}-k{k}-seed{seed}.jsonl"
                    if path.exists():
                        continue
                    started, partial = time.perf_counter(), path.with_suffix(".partial")
                    with partial.open(
                        "x"
                    ) as file:  # not one that another process is at, or left behind: delete it then
                        for row in Study(objective, k, seed, pool).steps(num_steps):
                            file.write(json.dumps(row) + "\n")
                            file.flush()
                    partial.rename(path)
                    print(
                        f"{path.stem}: {row['heldout']:.3f} held-out, {time.perf_counter() - started:.0f} s", flush=True
                    )
    finally:
        pool.close()


def read_runs(out: Path) -> dict[tuple[str, int], list[list[dict[str, Any]]]]:
    """(objective, staleness) -> the rows of each seed's run; only of runs that ended."""
    runs: dict[tuple[str, int], list[list[dict[str, Any]]]] = {}
    for path in sorted(out.glob("*.jsonl")):
        objective, k, _ = path.stem.split("-")
        runs.setdefault((objective, int(k[1:])), []).append(
            [json.loads(line) for line in path.read_text().splitlines()]
        )
    return runs


def table(runs: dict[tuple[str, int], list[list[dict[str, Any]]]]) -> str:
    """One line for each objective and staleness. Means over seeds; all but the rewards also over steps, those with old samples only."""
    lines = [
        "| objective | versions old | seeds | held-out at the end (each seed) | held-out, mean of the curve | train reward, last 10 steps "
        "| clipped | effective sample size | KL to the sampler | truncated | entropy at the end | gradient norm |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for (objective, k), seeds in sorted(runs.items(), key=lambda item: (item[0][1], item[0][0])):
        steps = [row for rows in seeds for row in rows if row.get("age") == k and "loss" in row]

        def mean(key: str, steps: list[dict[str, Any]] = steps) -> float:
            return fmean(row[key] for row in steps)

        finals = [rows[-1]["heldout"] for rows in seeds]
        curve = fmean(row["heldout"] for rows in seeds for row in rows if "heldout" in row)
        late = fmean(row["reward"] for rows in seeds for row in rows[-11:-1])
        entropy = fmean(row["entropy"] for rows in seeds for row in rows[-11:-1] if "entropy" in row)
        lines.append(
            f"| {objective} | {k} | {len(seeds)} | {fmean(finals):.3f} ({', '.join(f'{x:.3f}' for x in finals)}) | {curve:.3f} | {late:.3f} "
            f"| {mean('clip_share'):.1%} | {mean('ess_share'):.2f} | {mean('kl_k3'):.4f} | {mean('truncated_share'):.2%} "
            f"| {entropy:.3f} | {mean('grad_norm'):.2f} |"
        )
    return "\n".join(lines)


def plot(runs: dict[tuple[str, int], list[list[dict[str, Any]]]], path: Path) -> None:
    """Held-out reward over steps, a panel for each objective, and at the end over staleness; thin lines are single seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(OBJECTIVES) + 1, figsize=(13, 4), sharey=True)
    for axis, objective in zip(axes, OBJECTIVES, strict=False):
        for number, k in enumerate(STALENESS):
            seeds = [
                [(r["step"], r["heldout"]) for r in rows if "heldout" in r] for rows in runs.get((objective, k), [])
            ]
            for points in seeds:
                axis.plot(*zip(*points, strict=True), color=f"C{number}", alpha=0.3, linewidth=0.8)
            if seeds:
                steps = [step for step, _ in seeds[0]]
                means = [fmean(points[i][1] for points in seeds) for i in range(len(steps))]
                axis.plot(steps, means, color=f"C{number}", marker="o", label=f"{k} versions old")
        axis.set_title(objective)
        axis.set_xlabel("step")
    axes[0].legend()
    axes[0].set_ylabel("held-out pass@1")
    for number, objective in enumerate(OBJECTIVES):
        finals = [
            (k, [rows[-1]["heldout"] for rows in runs[objective, k]]) for k in STALENESS if (objective, k) in runs
        ]
        places = [STALENESS.index(k) for k, _ in finals]
        axes[-1].plot(places, [fmean(f) for _, f in finals], marker="o", color=f"C{number + 4}", label=objective)
        for place, (_, values) in zip(places, finals, strict=True):
            axes[-1].scatter([place] * len(values), values, color=f"C{number + 4}", alpha=0.4, s=15)
    axes[-1].set_xticks(range(len(STALENESS)), [str(k) for k in STALENESS])
    axes[-1].set_title("at the end")
    axes[-1].set_xlabel("versions old")
    axes[-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run, or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs' files")
    parser.add_argument("--staleness", type=int, nargs="+", default=STALENESS)
    parser.add_argument("--objectives", nargs="+", choices=OBJECTIVES, default=list(OBJECTIVES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--report", type=Path, help="print the table of the runs that ended, and plot them to this PNG")
    args = parser.parse_args()
    if args.report:
        print(table(runs := read_runs(args.out)))
        plot(runs, args.report)
        return
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_all(args.out, staleness=args.staleness, objectives=args.objectives, seeds=args.seeds, num_steps=args.steps)


if __name__ == "__main__":
    main()
