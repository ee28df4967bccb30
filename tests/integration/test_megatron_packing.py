"""Shared prefixes and the fused output layer: the same numbers as without them, in every layout of the local spec."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hf_models import SIZES, make_model, reference_logprobs
from learner_tools import make_policy, run_world
from packing_world import compare, make_groups, step
from torch import Tensor

from common.errors import InvariantError
from services.learner.megatron import segments as segments_module
from services.learner.megatron import vocab
from services.learner.megatron.segments import CPU_KERNEL, PLAIN_KERNEL, SegmentAttention, Segments
from services.learner.megatron.spec import _RMSNorm, _SwiGLU
from services.learner.megatron.vocab import LossRows, logprobs_and_entropy

# Of any element of any gradient, as a part of the largest element.
TOLERANCE = 1e-5

LAYOUTS = {
    "tensor": {"parallel": {"tensor": 2}},
    "tensor-sequence": {"parallel": {"tensor": 2, "sequence": True}},
    "pipeline": {"parallel": {"pipeline": 2}},
    "pipeline-virtual": {"parallel": {"pipeline": 2, "virtual_stages": 2}},
    "data": {},
    "data-distributed-optimizer": {"optimizer": {"distributed": True}},
}


# ---- attention ----

LENGTHS, SHARED = (3, 4, 2, 3, 5, 1, 2), ((3, 7, 12), (12, 17, 20))


def make_segments(lengths: tuple[int, ...] = LENGTHS, shared: tuple = SHARED) -> Segments:
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return Segments.of(starts, lengths, shared)


def dense_mask(layout: Segments) -> Tensor:
    """bool[T, T]: what each position may attend to, spelled out."""
    total = sum(layout.lengths)
    allowed, start = torch.zeros(total, total, dtype=torch.bool), 0
    for length in layout.lengths:
        allowed[start : start + length, start : start + length] = torch.ones(length, length).tril().bool()
        start += length
    for first, middle, end in layout.shared:
        allowed[middle:end, first:middle] = True
    return allowed


def make_inputs(num_heads: int, num_groups: int, dtype: torch.dtype, layout: Segments) -> list[Tensor]:
    torch.manual_seed(0)
    total = sum(layout.lengths)
    q, k, v = (torch.randn(total, heads, 8, dtype=dtype) for heads in (num_heads, num_groups, num_groups))
    angles = torch.rand(total, 1, 4, dtype=dtype)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), angles.cos(), angles.sin()]


def by_dense_mask(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, layout: Segments, scale: float) -> Tensor:
    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    repeats = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeats, 1) for x in (turn(k), v))
    scores = torch.einsum("mhd,nhd->hmn", turn(q), k) * scale
    probs = scores.masked_fill(~dense_mask(layout), -math.inf).softmax(-1)
    return torch.einsum("hmn,nhd->mhd", probs, v)


@pytest.mark.parametrize("kernel", [CPU_KERNEL, PLAIN_KERNEL], ids=["cpu", "plain"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("layout", [make_segments(), make_segments((5, 1, 7), ())], ids=["shared", "alone"])
def test_attention_and_its_gradients_are_those_of_a_dense_mask(monkeypatch, kernel, heads, layout) -> None:
    monkeypatch.setattr(segments_module, "_kernel", lambda query: kernel)
    inputs = make_inputs(*heads, torch.float64, layout)
    weights = torch.randn_like(inputs[0])
    results = []
    for attention in (SegmentAttention.apply, by_dense_mask):
        out = attention(*inputs, layout, 0.3)
        results.append([out, *torch.autograd.grad((out * weights).sum(), inputs[:3])])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


def test_the_gradients_of_attention_are_those_of_finite_differences() -> None:
    layout = make_segments((2, 3, 1, 2), ((2, 5, 8),))
    inputs = make_inputs(2, 1, torch.float64, layout)
    assert torch.autograd.gradcheck(lambda *x: SegmentAttention.apply(*x, layout, 0.3), inputs)


def test_16_bit_attention_is_near_the_exact_one() -> None:
    layout = make_segments()
    exact = make_inputs(6, 2, torch.float32, layout)
    rounded = [x.detach().bfloat16() for x in exact]
    got, expected = SegmentAttention.apply(*rounded, layout, 0.3), SegmentAttention.apply(*exact, layout, 0.3)
    torch.testing.assert_close(got.float(), expected, rtol=0, atol=0.05)


# ---- the output layer ----


@pytest.fixture
def one_process(tmp_path: Path) -> None:
    make_policy(make_model(tmp_path))  # joins a world of one


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_gradient", [True, False])
def test_log_probs_entropy_and_gradients_are_those_of_plain_torch(monkeypatch, temperature, entropy_gradient) -> None:
    monkeypatch.setattr(vocab, "CHUNK_ELEMENTS", {"cpu": 100})  # rows in several chunks
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 5, dtype=torch.float64), torch.randn(24, 5, dtype=torch.float64)
    rows = LossRows(torch.arange(7), torch.tensor([0, 3, 20, 20, 1, 7, 19]), 21, temperature, entropy_gradient)
    d_logprobs, d_entropy = torch.randn(7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)

    def plain(hidden: Tensor, weight: Tensor, rows: LossRows) -> tuple[Tensor, Tensor]:
        every = ((hidden @ weight.T)[:, : rows.vocab_size] / rows.temperature).log_softmax(-1)
        entropy = -(every.exp() * every).sum(-1)
        return every.gather(1, rows.labels[:, None])[:, 0], entropy if entropy_gradient else entropy.detach()

    results = []
    for function in (logprobs_and_entropy, plain):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        logprobs, entropy = function(*leaves, rows)
        ((logprobs * d_logprobs).sum() + (entropy * d_entropy).sum()).backward()
        results.append([logprobs, entropy, *(leaf.grad for leaf in leaves)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.usefixtures("one_process")
def test_a_second_backward_through_the_output_layer_fails_rather_than_being_wrong() -> None:
    rows = LossRows(torch.arange(2), torch.tensor([0, 1]), 3)
    logprobs, _ = logprobs_and_entropy(torch.randn(2, 4), torch.randn(3, 4, requires_grad=True), rows)
    logprobs.sum().backward(retain_graph=True)
    with pytest.raises(InvariantError, match="ran twice"):
        logprobs.sum().backward()


# ---- norm and activation ----


def test_the_norms_gradients_are_those_of_torch_and_of_finite_differences() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2, 6), (6,)))
    torch.testing.assert_close(_RMSNorm.apply(x, weight, 1e-5), torch.nn.functional.rms_norm(x, (6,), weight, 1e-5))
    assert torch.autograd.gradcheck(lambda *inputs: _RMSNorm.apply(*inputs, 1e-5), (x, weight))


def test_the_activations_gradient_is_that_of_finite_differences() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(_SwiGLU.apply(x), torch.nn.functional.silu(x[..., :4]) * x[..., 4:])
    assert torch.autograd.gradcheck(_SwiGLU.apply, (x,))


# ---- the policy ----


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen2", "qwen3"])
def test_shared_log_probs_equal_those_of_transformers_sequence_by_sequence(tmp_path: Path, kind: str) -> None:
    model = make_model(tmp_path, kind)
    policy = make_policy(model, max_tokens_per_microbatch=128)
    samples = make_groups(SIZES["vocab_size"], num_groups=2, group_size=3)
    assert any(batch.shared for batch in policy._local_batches(samples))
    for got, expected in zip(policy.logprobs(samples), reference_logprobs(model, samples), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)


def check(seen: dict, one: dict) -> None:
    """Shared and not agree on this rank, and with one process."""
    assert seen["difference"] < TOLERANCE
    assert seen["shared"]["positions"] < 0.7 * seen["alone"]["positions"]
    for way in ("shared", "alone"):
        for got, expected in zip(seen[way]["logprobs"], one["logprobs"], strict=True):
            assert got == pytest.approx(expected, abs=1e-4)
        for name in ("loss", "grad_norm", "entropy", "kl_k3", "ratio_max"):
            assert seen[way]["stats"][name] == pytest.approx(one["stats"][name], rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_gradients_are_those_of_the_unshared_batch(tmp_path: Path, kind: str) -> None:
    seen = compare(make_model(tmp_path / "model", kind), {})
    check(seen, seen["alone"])


@pytest.mark.slow
def test_in_every_layout_gradients_are_those_of_the_unshared_batch(tmp_path: Path) -> None:
    model, out = make_model(tmp_path / "model", "qwen2"), tmp_path / "out"
    one, _ = step(model, {}, share="off")
    out.mkdir()
    layouts = json.dumps(list(LAYOUTS.values()))
    done = run_world("packing_world.py", model, out, layouts, num_ranks=2, timeout_s=500)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        results = json.loads((out / f"rank{rank}.json").read_text())
        for layout, seen in zip(LAYOUTS, results, strict=True):
            assert len(seen["shared"]["logprobs"]) == len(one["logprobs"]), layout
            if "data" not in layout:
                check(seen, one)
            else:  # each rank has its own samples, and with the distributed optimizer only a part of the sums is complete
                assert layout == "data-distributed-optimizer" or seen["difference"] < TOLERANCE, layout
                for name in ("loss", "grad_norm"):
                    assert seen["shared"]["stats"][name] == pytest.approx(one["stats"][name], rel=1e-4), layout
