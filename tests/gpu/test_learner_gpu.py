"""The learner's own kernels on a GPU: variable-length attention with shared prefixes, the output layer, and a step in bfloat16."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from hf_models import make_model
from packing_world import compare, step
from test_megatron_packing import LENGTHS, SHARED, by_dense_mask, make_inputs, make_segments

from bench import learner
from services.learner.megatron.segments import PLAIN_KERNEL, VARLEN_KERNEL, SegmentAttention, Segments, _kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_gpu(lengths: tuple[int, ...], shared: tuple) -> Segments:
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    return Segments.of(starts, lengths, shared)


@pytest.mark.parametrize("heads", [(8, 8), (6, 2)])
@pytest.mark.parametrize("shared", [SHARED, ()], ids=["shared", "alone"])
def test_variable_length_attention_is_that_of_a_dense_mask(heads: tuple[int, int], shared: tuple) -> None:
    exact = make_inputs(*heads, torch.float32, make_segments(LENGTHS, shared))
    rounded = [x.detach().to("cuda", torch.bfloat16).requires_grad_(x.requires_grad) for x in exact]
    assert _kernel(rounded[0]) is VARLEN_KERNEL
    weights = torch.randn_like(exact[0])
    results = []
    for attention, inputs, layout in (
        (SegmentAttention.apply, rounded, on_gpu(LENGTHS, shared)),
        (by_dense_mask, exact, make_segments(LENGTHS, shared)),
    ):
        out = attention(*inputs, layout, 0.3)
        grads = torch.autograd.grad((out.cpu().float() * weights).sum(), inputs[:3])
        results.append([x.detach().cpu().float() for x in (out, *grads)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


def test_float32_attention_takes_the_plain_kernel_and_is_exact() -> None:
    inputs = make_inputs(6, 2, torch.float32, make_segments())
    there = [x.detach().cuda() for x in inputs]
    assert _kernel(there[0]) is PLAIN_KERNEL
    got = SegmentAttention.apply(*there, on_gpu(LENGTHS, SHARED), 0.3).cpu()
    torch.testing.assert_close(got, by_dense_mask(*inputs, make_segments(), 0.3).detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_with_shared_prefixes_are_those_without(tmp_path: Path, dtype: str) -> None:
    seen = compare(make_model(tmp_path / "model", "qwen2"), {"device": "cuda", "dtype": dtype})
    assert seen["difference"] < (1e-4 if dtype == "float32" else 0.05)
    assert seen["shared"]["positions"] < seen["alone"]["positions"]


def test_a_step_in_bfloat16_is_near_one_in_float32(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3")
    (exact, _), (rounded, _) = (
        step(model, {"device": "cuda", "dtype": dtype}, share="auto") for dtype in ("float32", "bfloat16")
    )
    for name in ("loss", "grad_norm", "entropy"):
        assert rounded["stats"][name] == pytest.approx(exact["stats"][name], rel=0.05, abs=0.01), name


def test_the_benchmark_reports_mfu() -> None:
    options = ["--device", "cuda", "--shape", "tiny", "--work", "tiny", "--rounds", "1", "--matmul-size", "256"]
    assert "MFU" in learner.main([*options, "--peak-tflops", "100"])
