"""The clipped objective: by hand, by finite differences, and under splits."""

from __future__ import annotations

import math

import pytest
import torch

from services.learner.losses import MAX_NAMES, SUM_NAMES, clipped_objective, kl_k3

CLIP = {"clip_low": 0.2, "clip_high": 0.28}


def objective(ratios, advantages, mask=None):
    """The objective of tokens with these ratios to a behaviour log-prob of -1."""
    behaviour = torch.full((len(ratios),), -1.0)
    logprobs = (behaviour + torch.tensor(ratios).log()).requires_grad_()
    mask_T = torch.tensor(mask if mask is not None else [True] * len(ratios))
    loss, sums = clipped_objective(logprobs, behaviour, torch.tensor(advantages), mask_T, **CLIP)
    loss.backward()
    named = dict(zip(SUM_NAMES, sums.sums.tolist(), strict=True))
    return loss.item(), logprobs.grad, named, dict(zip(MAX_NAMES, sums.maxima.tolist(), strict=True))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),  # on-policy: the policy gradient, -A
        (1.2, 2.0, -2.4, -2.4, False),  # inside the clip
        (1.5, 2.0, -2.56, 0.0, True),  # a good token already far more likely: cut at 1.28
        (1.5, -2.0, 3.0, 3.0, False),  # a bad one is still pushed down
        (0.5, 2.0, -1.0, -1.0, False),  # a good one that became rare is pulled up
        (0.5, -2.0, 1.6, 0.0, True),  # a bad one already rare: cut at 0.8
    ],
)
def test_each_side_of_the_clip_by_hand(ratio, advantage, loss, grad, clipped) -> None:
    got, gradient, sums, _ = objective([ratio], [advantage])
    assert got == pytest.approx(loss, rel=1e-5)
    assert gradient.item() == pytest.approx(grad, rel=1e-5)
    assert sums["num_clipped"] == clipped


def test_statistics_by_hand() -> None:
    loss, _, sums, maxima = objective([1.0, 2.0, 0.5, 9.0], [1.0, 1.0, 1.0, 1.0], [True, True, True, False])
    assert sums["num_loss_tokens"] == 3
    assert sums["loss"] == pytest.approx(loss)
    assert sums["ratio"] == pytest.approx(3.5)
    assert sums["gap"] == pytest.approx(2 * math.log(2))
    # (2 - 1 - log 2) + (0.5 - 1 + log 2)
    assert sums["kl"] == pytest.approx(0.5, rel=1e-5)
    assert maxima["ratio"] == pytest.approx(2.0)
    assert maxima["gap"] == pytest.approx(math.log(2))


def test_positions_off_the_mask_count_for_nothing_even_when_not_finite() -> None:
    logprobs = torch.tensor([-1.0, float("nan"), float("-inf")], requires_grad=True)
    mask = torch.tensor([True, False, False])
    loss, sums = clipped_objective(logprobs, torch.full((3,), -1.0), torch.ones(3), mask, **CLIP)
    loss.backward()
    assert loss.item() == -1.0
    assert logprobs.grad.tolist() == [-1.0, 0.0, 0.0]
    assert torch.isfinite(sums.sums).all()


def test_a_nan_on_the_mask_reaches_the_loss() -> None:
    loss, _ = clipped_objective(
        torch.tensor([float("nan")]), torch.zeros(1), torch.ones(1), torch.tensor([True]), **CLIP
    )
    assert math.isnan(loss.item())


def test_an_absurd_ratio_gives_a_finite_loss() -> None:
    loss, sums = clipped_objective(
        torch.tensor([0.0]), torch.tensor([-500.0]), -torch.ones(1), torch.tensor([True]), **CLIP
    )
    assert math.isfinite(loss.item())
    assert sums.maxima[MAX_NAMES.index("gap")] == 500.0


def test_gradient_equals_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    logprobs = (-torch.rand(40, generator=generator, dtype=torch.float64) * 2).requires_grad_()
    # Ratios from 0.37 to 2.7, and none within 1e-3 of a kink, where the derivative jumps.
    behaviour = logprobs.detach() - torch.linspace(-1, 1, 40, dtype=torch.float64)
    advantages = torch.randn(40, generator=generator, dtype=torch.float64)
    mask = torch.rand(40, generator=generator) > 0.3
    assert torch.autograd.gradcheck(lambda x: clipped_objective(x, behaviour, advantages, mask, **CLIP)[0], logprobs)


def test_the_sum_is_the_same_under_any_split_into_micro_batches() -> None:
    generator = torch.Generator().manual_seed(1)
    parts = [torch.randn(64, generator=generator, dtype=torch.float64) for _ in range(3)]
    mask = torch.rand(64, generator=generator) > 0.5
    whole, whole_sums = clipped_objective(*parts, mask, **CLIP)
    split = [clipped_objective(*(p[i : i + 16] for p in parts), mask[i : i + 16], **CLIP) for i in range(0, 64, 16)]
    torch.testing.assert_close(sum(loss for loss, _ in split), whole)
    torch.testing.assert_close(sum(item.sums for _, item in split), whole_sums.sums)


def test_k3_is_zero_at_equality_never_negative_and_near_the_true_kl() -> None:
    assert kl_k3(torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    assert (kl_k3(torch.linspace(-5, 5, 101, dtype=torch.float64)) >= 0).all()
    q, p = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    expected = (q * (q / p).log()).sum()
    torch.testing.assert_close((q * kl_k3((p / q).log())).sum(), expected)
