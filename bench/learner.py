"""The learner's step: trained tokens a second, padded share, model flops against a measured matmul ceiling; beside TRL's GRPO step.

    python -m bench.learner [--rounds 5] [--threads 1] [--dtype float32]
    python -m bench.learner --device cuda --rounds 10

On a CPU: SmolLM2-135M (`make smollm2`; a random model of its shape where that is missing), 2 groups of 8 completions, in turn with
TRL, whose settings `bench/learner_trl.py` tells. On a GPU: a random model of Qwen2.5-1.5B's shape in bfloat16, 32 groups of 8, without
TRL. Both are one whole step: packing or padding, forward, loss, backward, clipping, AdamW, statistics.

CPU seconds stand beside wall seconds: with other work on the machine they say more. Rates are by wall seconds.

tokens/s: prompt and completion tokens of the batch, every sample counted by itself, by the seconds of the step. Flops are those of
the positions that are really needed: no padding, shared prefixes once (ours), the output layer at completion tokens.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench import learner_trl
from bench.learner_work import SHAPES, WORKS, Counts, count_batches, count_samples, make_samples, write_random_model
from common.errors import ForebayError
from services.learner.config import LearnerConfig
from services.learner.megatron.policy import MegatronPolicy
from services.learner.packing import TrainSample

SMOLLM2 = Path("models/SmolLM2-135M-Instruct")
LR = 1e-6
# Dense bfloat16, from the vendors' data sheets: flops a second by a part of the device's name.
PEAKS = {"H200": 989e12, "H100 SXM": 989e12, "H100 80GB HBM3": 989e12, "H100 PCIe": 756e12, "A100": 312e12}


@dataclass
class Row:
    """One way of doing the step."""

    name: str
    computed: Counts
    needed: Counts
    padding: int  # positions of ``computed`` that hold no token
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)  # of all threads of this process


@dataclass(frozen=True)
class Result:
    """All that was measured. ``ceilings``: matmul flops a second, one a round."""

    rows: list[Row]
    ceilings: list[float]
    samples: list[TrainSample]
    policy: MegatronPolicy


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype, *, size: int, seconds: float = 1.0) -> float:
    """Of products of two ``size`` x ``size`` matrices, as many as take about ``seconds``."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    a @ b
    sync()
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        for _ in range(10 if device.type == "cuda" else 1):
            a @ b
            count += 1
        sync()
    return 2.0 * size**3 * count / (time.perf_counter() - start)


def make_policy(args: argparse.Namespace, model: Path, share: str) -> MegatronPolicy:
    """The learner as a run has it, without the alarm: the log-probs are made up."""
    config = LearnerConfig.model_validate(
        {
            "device": args.device,
            "dtype": args.dtype,
            "num_threads": args.threads,
            "max_tokens_per_microbatch": args.microbatch_tokens,
            "share_prefixes": share,
            "logprob_gap_alarm": None,
            "optimizer": {"lr": LR, "clip_grad_norm": 1.0},
        }
    )
    return MegatronPolicy(config, model, seed=0, deterministic=False)


def measure(args: argparse.Namespace, model: Path, folder: Path) -> Result:
    """Alternating rounds of all rows, after one round to warm up."""
    policy = make_policy(args, model, "auto")
    samples = make_samples(args.batch, policy.model.arch.vocab_size, seed=args.seed)
    alone = count_samples(samples)
    rows: list[Row] = []
    ours: list[Callable[[], None]] = []
    for share in ("auto", "off") if args.both else ("auto",):
        _set_sharing(policy, share)
        counts, padding = _count_ours(policy, samples)
        row = Row("Forebay" if share == "auto" else "Forebay, no shared prefixes", counts, counts, padding)
        rows.append(row)
        ours.append(_our_step(policy, samples, row, share))
    ceilings: list[float] = []
    size = args.matmul_size

    def round_of_ours() -> None:
        ceilings.append(matmul_flops_per_s(policy.device, getattr(torch, args.dtype), size=size))
        for step in ours:
            step()

    if not args.trl:
        for _ in range(args.rounds + 1):
            round_of_ours()
    for completions_only in args.trl:
        padded = learner_trl.padded(samples)
        positions = padded["prompt_ids"].numel() + padded["completion_ids"].numel()
        head = alone.rows if completions_only else positions
        name = "TRL" + (", output layer at completions only" if completions_only else "")
        row = Row(name, Counts(positions, alone.pairs, head), alone, positions - alone.positions)
        row.seconds, row.cpu_seconds = learner_trl.run_steps(
            model,
            samples,
            group_size=args.batch.group_size,
            microbatch=args.trl_microbatch,
            dtype=args.dtype,
            lr=LR,
            num_steps=args.rounds + 1,
            folder=folder / "trl",
            between=round_of_ours,
            completions_only=completions_only,
        )
        rows.append(row)
    for row in rows:
        row.seconds, row.cpu_seconds = row.seconds[1:], row.cpu_seconds[1:]
    return Result(rows, ceilings[1:], samples, policy)


def _count_ours(policy: MegatronPolicy, samples: Sequence[TrainSample]) -> tuple[Counts, int]:
    """(what the micro-batches have, how much of it is alignment)."""
    counts, alignment = count_batches(policy._local_batches(samples)), policy.alignment
    policy.alignment = 1
    padding = counts.positions - count_batches(policy._local_batches(samples)).positions
    policy.alignment = alignment
    return counts, padding


def _set_sharing(policy: MegatronPolicy, share: str) -> None:
    policy.config = policy.config.model_copy(update={"share_prefixes": share})


def _our_step(policy: MegatronPolicy, samples: Sequence[TrainSample], row: Row, share: str) -> Callable[[], None]:
    def step() -> None:
        _set_sharing(policy, share)
        if policy.device.type == "cuda":
            torch.cuda.synchronize()
        start, cpu_start = time.perf_counter(), time.process_time()
        policy.train_step(samples, total_steps_done=len(row.seconds))
        if policy.device.type == "cuda":
            torch.cuda.synchronize()
        row.seconds.append(time.perf_counter() - start)
        row.cpu_seconds.append(time.process_time() - cpu_start)

    return step


def report(args: argparse.Namespace, result: Result) -> str:
    """A markdown table, and the lines around it."""
    arch, samples = result.policy.model.arch, result.samples
    alone = count_samples(samples)
    ceiling = median(result.ceilings)
    lines = [
        f"{len(samples)} samples in {args.batch.num_groups} groups: {alone.positions} tokens, {alone.rows} of them completion;"
        f" {args.dtype}, {args.device}, {torch.get_num_threads()} thread(s), torch {torch.__version__}.",
        f"Matmul ceiling: {ceiling / 1e9:,.1f} GFLOP/s (median of {len(result.ceilings)} rounds of {args.matmul_size}^3).",
        "",
        "| | step, s: median (range) | CPU s | tokens/s | completion tokens/s | positions computed | padded | GFLOP/s | of the ceiling |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result.rows:
        seconds = median(row.seconds)
        rate = row.needed.flops(arch) / seconds
        lines.append(
            f"| {row.name} | {seconds:.2f} ({min(row.seconds):.2f}-{max(row.seconds):.2f}) | {median(row.cpu_seconds):.2f} | {alone.positions / seconds:,.1f}"
            f" | {alone.rows / seconds:,.1f} | {row.computed.positions} | {row.padding / row.computed.positions:.1%}"
            f" | {rate / 1e9:,.1f} | {rate / ceiling:.1%} |"
        )
    lines += _ratios(result.rows)
    if args.device == "cuda":
        lines += _mfu(args, result)
    return "\n".join(lines)


def _ratios(rows: Sequence[Row]) -> list[str]:
    """How many times faster the first row is than each other, and by what."""
    first, lines = rows[0], []
    for row in rows[1:]:
        whole, in_cpu = (
            median(b) / median(a) for a, b in ((first.seconds, row.seconds), (first.cpu_seconds, row.cpu_seconds))
        )
        # In pairs of neighbouring rounds, since the machine's speed drifts.
        pairs = sorted(b / a for a, b in zip(first.seconds, row.seconds, strict=False))
        fewer = row.computed.positions / first.computed.positions
        lines.append(
            f"\n{first.name} against {row.name}: {whole:.2f} times the tokens a second (rounds: {pairs[0]:.2f}-{pairs[-1]:.2f}),"
            f" {in_cpu:.2f} times by CPU seconds = {fewer:.2f} (positions computed) x {in_cpu / fewer:.2f} (cost of each position)."
        )
    return lines


def _mfu(args: argparse.Namespace, result: Result) -> list[str]:
    name = torch.cuda.get_device_name()
    peak = args.peak_tflops * 1e12 if args.peak_tflops else next((v for k, v in PEAKS.items() if k in name), None)
    rate = result.rows[0].needed.flops(result.policy.model.arch) / median(result.rows[0].seconds)
    memory = torch.cuda.max_memory_allocated() / 2**30
    against = f"{rate / peak:.1%} of {peak / 1e12:,.0f} TFLOP/s" if peak else "unknown peak: give --peak-tflops"
    return [f"\n{name}: MFU {against}; {memory:.1f} GiB of device memory at most."]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.learner", description=str(__doc__).split("\n\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder (default: SmolLM2-135M, or a random one)")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="instead: a random model of this shape")
    parser.add_argument("--work", choices=sorted(WORKS), help="the batch (default: short on cpu, long on cuda)")
    parser.add_argument("--groups", type=int, help="other than the batch has")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on cpu, bfloat16 on cuda")
    parser.add_argument("--rounds", type=int, default=5, help="after one to warm up")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--microbatch-tokens", type=int, help="ours: default 4096 on cpu, 16384 on cuda")
    parser.add_argument("--both", action="store_true", help="also without shared prefixes")
    parser.add_argument("--no-trl", action="store_true", help="ours alone")
    parser.add_argument("--trl-microbatch", type=int, default=4, help="TRL's per_device_train_batch_size")
    parser.add_argument(
        "--trl-completions-only", action="store_true", help="also TRL with that change: see learner_trl.py"
    )
    parser.add_argument("--peak-tflops", type=float, help="of the GPU, where its name is not known here")
    parser.add_argument("--matmul-size", type=int, help="default: 1024 on cpu, 8192 on cuda")
    return parser


def resolve(args: argparse.Namespace) -> argparse.Namespace:
    """Fills in the defaults that depend on the device; ``args.trl`` becomes the TRL variants to run."""
    on_gpu = args.device == "cuda"
    args.work = args.work or ("long" if on_gpu else "short")
    args.batch = WORKS[args.work]
    if args.groups:
        args.batch = replace(args.batch, num_groups=args.groups)
    args.dtype = args.dtype or ("bfloat16" if on_gpu else "float32")
    args.microbatch_tokens = args.microbatch_tokens or (16384 if on_gpu else 4096)
    args.matmul_size = args.matmul_size or (8192 if on_gpu else 1024)
    wanted = not args.no_trl and not on_gpu
    if wanted and not learner_trl.have_trl():
        print(learner_trl.INSTALL)
        wanted = False
    args.trl = ([False, True] if args.trl_completions_only else [False]) if wanted else []
    return args


def find_model(args: argparse.Namespace, folder: Path) -> tuple[Path, str]:
    """(model folder, what it is)."""
    if args.model:
        return args.model, str(args.model)
    if not args.shape and args.device == "cpu" and (SMOLLM2 / "config.json").is_file():
        return SMOLLM2, str(SMOLLM2)
    shape = args.shape or ("qwen2.5-1.5b" if args.device == "cuda" else "smollm2-135m")
    return write_random_model(folder / shape, shape, args.dtype), f"random weights in the shape of {shape}"


def main(argv: Sequence[str] | None = None) -> str:
    """Measures and prints; returns what it printed."""
    args: Any = resolve(parser().parse_args(argv))
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        model, what = find_model(args, Path(folder))
        text = f"{what}\n" + report(args, measure(args, model, Path(folder)))
    print(text)
    return text


if __name__ == "__main__":
    try:
        main()
    except ForebayError as error:
        sys.exit(f"error: {error}")
