"""Parts of the learner's step on a CPU, one thread, in CPU seconds: what sharing costs, the norm, and bfloat16.

    python -m bench.learner_parts [--model models/SmolLM2-135M-Instruct]

Without ``--model`` the last part, whole steps in float32 and bfloat16 in turn, is left out. Attention and norm have SmolLM2's shapes.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F

from bench.learner import make_policy, parser, resolve
from bench.learner_work import WORKS, make_samples
from services.learner.megatron.segments import SegmentAttention, Segments
from services.learner.megatron.spec import _RMSNorm

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
# (in, out) of the matrices of one layer.
MATRICES = ((576, 960), (576, 576), (576, 3072), (1536, 576))


def least(function: Callable[[], object], count: int = 15) -> float:
    """CPU seconds of the cheapest of ``count`` calls."""
    function()
    seconds = []
    for _ in range(count):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return min(seconds)


def attention_s(lengths: list[int], shared: tuple[tuple[int, int, int], ...]) -> float:
    """Forward and backward of one layer's attention."""
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    segments = Segments.of(starts, tuple(lengths), shared)
    total = sum(lengths)
    q, k, v = (torch.randn(total, n, HEAD_DIM, requires_grad=True) for n in (HEADS, KV_HEADS, KV_HEADS))
    cos, sin, grad = *torch.rand(2, total, 1, HEAD_DIM // 2), torch.randn(total, HEADS, HEAD_DIM)
    return least(
        lambda: torch.autograd.grad(SegmentAttention.apply(q, k, v, cos, sin, segments, 0.125), (q, k, v), grad)
    )


def matrices_s(num_tokens: int) -> float:
    """Forward and backward of one layer's matrices."""
    pairs = [(torch.randn(num_tokens, n), torch.randn(n, m), torch.randn(num_tokens, m)) for n, m in MATRICES]
    return least(lambda: [(x @ w, grad @ w.T, x.T @ grad) for x, w, grad in pairs], 5)


def sharing() -> None:
    """Attention of completions of 100 tokens with the same prefix, shared against alone."""
    token_s = (matrices_s(1024) - matrices_s(512)) / 512
    print(f"matrices of one token in one layer: {token_s * 1e6:.0f} us")
    for count, prefix in itertools.product((2, 8), (1, 4, 8, 16, 32, 100)):
        alone = attention_s([prefix + 100] * count, ())
        shared = attention_s([prefix] + [100] * count, ((0, prefix, prefix + 100 * count),))
        print(f"{count} completions behind {prefix} tokens: {(shared - alone) / token_s:+.1f} tokens by sharing")


def norm() -> None:
    """Forward and backward of one norm."""
    x, weight = (torch.randn(shape, requires_grad=True) for shape in ((1800, 1, 576), (576,)))
    grad = torch.randn(1800, 1, 576)
    for name, function in (
        ("ours", lambda: _RMSNorm.apply(x, weight, 1e-5)),
        ("torch's", lambda: F.rms_norm(x, (576,), weight, 1e-5)),
    ):
        seconds = least(lambda function=function: torch.autograd.grad(function(), (x, weight), grad))
        print(f"RMSNorm, {name}: {seconds * 1e3:.1f} ms")


def dtypes(model: Path) -> None:
    """Whole steps in both types, in turn, and how far their log-probs are apart."""
    policies = {}
    for dtype in ("float32", "bfloat16"):
        args = resolve(parser().parse_args(["--no-trl", "--dtype", dtype]))
        policies[dtype] = make_policy(args, model, "auto")
    samples = make_samples(WORKS["tiny"], policies["float32"].model.arch.vocab_size, seed=0)
    logprobs = {dtype: np.concatenate(policy.logprobs(samples)) for dtype, policy in policies.items()}
    seconds: dict[str, list[float]] = {dtype: [] for dtype in policies}
    for step in range(3):
        for dtype, policy in policies.items():
            start = time.process_time()
            policy.train_step(samples, total_steps_done=step)
            seconds[dtype].append(time.process_time() - start)
    for dtype, taken in seconds.items():
        square = torch.randn(512, 512, dtype=getattr(torch, dtype))
        rate = 2 * 512**3 / least(lambda square=square: square @ square, 3) / 1e9
        print(f"{dtype}: {median(taken):.2f} s a step; matrices of 512 x 512 at {rate:.1f} GFLOP/s")
    gap = np.abs(logprobs["float32"] - logprobs["bfloat16"])
    print(f"log-probs differ by {gap.mean():.3f} nats on average, {gap.max():.2f} at most")


def main() -> None:
    """Prints all parts."""
    arguments = argparse.ArgumentParser(prog="python -m bench.learner_parts")
    arguments.add_argument("--model", type=Path)
    args = arguments.parse_args()
    torch.set_num_threads(1)
    sharing()
    norm()
    if args.model:
        dtypes(args.model)


if __name__ == "__main__":
    main()
