"""Every objective: against plain loops, by hand, by finite differences, and under splits."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.learner.config import ObjectiveConfig
from services.learner.importance import Sequences, importance_weights
from services.learner.kl import k1, k2, k3
from services.learner.losses import LossInputs, policy_loss
from services.learner.token_statistics import NUM_BINS, Totals, quantile
from tests.learner_reference import OBJECTIVES, Sequence, reference_loss


def config_of(name: str) -> ObjectiveConfig:
    return ObjectiveConfig.model_validate(OBJECTIVES[name])


def make_sequences(
    lengths=(5, 1, 9, 3, 7, 4, 6, 2), *, seed=0, dtype=torch.float64, spread=0.3, has_kl=True
) -> list[Sequence]:
    """Sequences whose ratios lie on both sides of every clip, none within 1e-4 of a kink."""
    generator = torch.Generator().manual_seed(seed)

    def noise(length: int) -> torch.Tensor:
        return torch.randn(length, generator=generator, dtype=torch.float64)

    made = []
    for length in lengths:
        logprobs = -noise(length).abs() - 0.1
        made.append(
            Sequence(
                logprobs=logprobs.to(dtype, copy=True).requires_grad_(),
                behaviour=(logprobs + spread * noise(length)).to(dtype),
                advantage=float(noise(1)),
                start=(logprobs + spread / 2 * noise(length)).to(dtype),
                reference=(logprobs + spread * noise(length)).to(dtype) if has_kl else None,
                entropy=noise(length).abs().to(dtype).requires_grad_(),
            )
        )
    return made


def packed(sequences: list[Sequence], *, junk: float = float("nan"), gap: int = 2) -> LossInputs:
    """The sequences one after the other, with ``gap`` positions of junk before, between and after them."""
    dtype = sequences[0].logprobs.dtype

    def lay(parts: list[torch.Tensor], fill: float | bool | int, as_dtype: torch.dtype) -> torch.Tensor:
        filler = torch.full((gap,), fill, dtype=as_dtype)
        return torch.cat([filler, *(x for part in parts for x in (part.to(as_dtype), filler))])

    def column(name: str) -> torch.Tensor | None:
        parts = [getattr(s, name) for s in sequences]
        return None if any(part is None for part in parts) else lay(parts, junk, dtype)

    ones = [torch.ones(len(s.logprobs), dtype=torch.float64) for s in sequences]
    return LossInputs(
        logprobs_T=column("logprobs"),
        behaviour_T=column("behaviour"),
        advantages_T=lay([one * s.advantage for one, s in zip(ones, sequences, strict=True)], junk, dtype),
        mask_T=lay(ones, False, torch.bool),
        slots_T=lay([one * i for i, one in enumerate(ones)], 0, torch.int64),
        num_sequences=len(sequences),
        entropy_T=column("entropy"),
        start_T=column("start"),
        reference_T=column("reference"),
    )


def mean_loss(sequences: list[Sequence], config: ObjectiveConfig, splits=None, **options) -> torch.Tensor:
    """The packed loss over micro-batches that end where ``splits`` say."""
    bounds = [0, *(splits or []), len(sequences)]
    parts = [policy_loss(packed(sequences[a:b], **options), config) for a, b in itertools.pairwise(bounds) if a < b]
    return sum(loss for loss, _, _ in parts) / sum(int(divisor) for _, divisor, _ in parts)


def gradients(loss: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    leaves = [leaf for s in sequences for leaf in (s.logprobs, s.entropy)]
    got = torch.autograd.grad(loss, leaves, allow_unused=True)
    return torch.cat([torch.zeros_like(x) if g is None else g for g, x in zip(got, leaves, strict=True)])


def with_kl_where_configured(config: ObjectiveConfig, **options) -> list[Sequence]:
    return make_sequences(has_kl=config.kl_coef > 0, **options)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("has_start", [True, False])
def test_value_and_gradient_equal_those_of_plain_loops_over_sequences(name: str, has_start: bool) -> None:
    config = config_of(name)
    sequences = with_kl_where_configured(config)
    if not has_start:
        sequences = [dataclasses.replace(s, start=None) for s in sequences]
    got, expected = mean_loss(sequences, config), reference_loss(sequences, config)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    slope = gradients(got, sequences)
    torch.testing.assert_close(slope, gradients(expected, sequences), rtol=1e-12, atol=1e-12)
    assert slope.abs().max() > 1e-3


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("splits", [[4], [2, 4, 6], [1, 2, 3, 4, 5, 6, 7]], ids=["2x4", "4x2", "8x1"])
def test_the_gradient_is_the_same_in_one_micro_batch_of_8_and_in_any_split(name: str, splits: list[int]) -> None:
    config = config_of(name)
    sequences = with_kl_where_configured(config, dtype=torch.float32)
    whole, split = mean_loss(sequences, config), mean_loss(sequences, config, splits)
    torch.testing.assert_close(split, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients(split, sequences), gradients(whole, sequences), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_equals_finite_differences_with_what_is_detached_held_fixed(name: str) -> None:
    """The start policy is given, so weights that are made of it stay put while the log-probs are moved; CISPO's weight, which is
    of the moved log-probs, is held by its own test below."""
    config = config_of(name)
    if config.kind == "cispo":
        config = config.model_copy(update={"kind": "clipped"})
    sequences = with_kl_where_configured(config)
    inputs = packed(sequences, junk=0.5)

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        return policy_loss(dataclasses.replace(inputs, logprobs_T=logprobs, entropy_T=entropy), config)[0]

    moved = [x.detach().clone().requires_grad_() for x in (inputs.logprobs_T, inputs.entropy_T)]
    assert torch.autograd.gradcheck(loss, moved)


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_weight_of_cispo_carries_no_gradient(decoupled: bool) -> None:
    config = config_of("decoupled-cispo" if decoupled else "cispo")
    sequences = make_sequences(has_kl=False)
    got = gradients(mean_loss(sequences, config), sequences)
    # Held fixed, the weight makes the loss linear: its slope between any two points is the gradient.
    slopes = []
    for s in sequences:
        one = [dataclasses.replace(s, logprobs=s.logprobs.detach(), entropy=s.entropy.detach())]
        weight = -mean_loss(one, config) / (s.advantage * s.logprobs.detach()).mean() if len(s.logprobs) == 1 else None
        anchor = s.start if decoupled else s.behaviour
        clipped = (s.logprobs.detach() - anchor).exp().clamp(1 - config.clip_low, 1 + config.clip_high)
        outer = (s.start - s.behaviour).exp().clamp(max=config.importance_max) if decoupled else 1.0
        if weight is not None:
            torch.testing.assert_close(weight, (clipped * outer)[0])
        slopes += [-(clipped * outer) * s.advantage, torch.zeros_like(s.entropy)]
    tokens = sum(len(s.logprobs) for s in sequences)
    torch.testing.assert_close(got, torch.cat(slopes) / tokens, rtol=1e-12, atol=1e-12)
    # And where the weight is not cut, it would have mattered: the live function has another slope.
    step = 1e-6
    up = [dataclasses.replace(s, logprobs=(s.logprobs.detach() + step), start=s.start) for s in sequences]
    down = [dataclasses.replace(s, logprobs=(s.logprobs.detach() - step), start=s.start) for s in sequences]
    live = (mean_loss(up, config) - mean_loss(down, config)) / (2 * step)
    assert abs(float(live) - float(got.sum())) > 1e-3


@pytest.mark.parametrize("importance", ["full", "truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_carry_no_gradient_even_when_the_start_policy_is_the_trained_one(
    importance: str, level: str
) -> None:
    most = {} if importance == "full" else {"importance_max": 1.3}
    config = ObjectiveConfig(decoupled=True, importance=importance, importance_level=level, **most)
    live = [dataclasses.replace(s, start=None) for s in make_sequences(has_kl=False)]
    fixed = [dataclasses.replace(s, start=s.logprobs.detach().clone()) for s in live]
    torch.testing.assert_close(
        gradients(mean_loss(live, config), live), gradients(mean_loss(fixed, config), fixed), rtol=0, atol=0
    )
    ones = Sequences.of(torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64), 1, torch.float32)
    assert not importance_weights(torch.zeros(3, requires_grad=True), ones, config).requires_grad


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -1e30, 7.0])
def test_what_stands_off_the_mask_counts_for_nothing(name: str, junk: float) -> None:
    config = config_of(name)
    sequences = with_kl_where_configured(config)
    clean, dirty = mean_loss(sequences, config, gap=1, junk=0.0), mean_loss(sequences, config, gap=3, junk=junk)
    torch.testing.assert_close(dirty, clean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(dirty, sequences), gradients(clean, sequences), rtol=1e-12, atol=1e-12)
    stats = [policy_loss(packed(sequences, junk=value), config)[2] for value in (0.0, junk)]
    torch.testing.assert_close(stats[0].sums, stats[1].sums)
    torch.testing.assert_close(stats[0].maxima, stats[1].maxima)


@settings(max_examples=60)
@given(
    name=st.sampled_from(sorted(OBJECTIVES)),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=7),
    cuts=st.sets(st.integers(1, 6)),
    seed=st.integers(0, 1000),
    spread=st.floats(0.01, 3.0),
)
def test_any_batch_in_any_split_has_the_loss_of_plain_loops(name, lengths, cuts, seed, spread) -> None:
    config = config_of(name)
    sequences = with_kl_where_configured(config, lengths=lengths, seed=seed, spread=spread)
    got = mean_loss(sequences, config, sorted(cut for cut in cuts if cut < len(lengths)))
    expected = reference_loss(sequences, config)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients(got, sequences), gradients(expected, sequences), rtol=1e-9, atol=1e-12)


@settings(max_examples=60)
@given(
    ratios=st.lists(st.floats(-4, 4), min_size=1, max_size=12),
    low=st.floats(0.0, 1.0),
    high=st.floats(1.0, 5.0),
    level=st.sampled_from(["token", "sequence"]),
    importance=st.sampled_from(["truncate", "mask"]),
)
def test_weights_keep_their_bounds_and_those_within_are_unchanged(ratios, low, high, level, importance) -> None:
    config = ObjectiveConfig(
        decoupled=True,
        importance=importance,
        importance_level=level,
        importance_max=high,
        importance_min=low if importance == "mask" else 0.0,
    )
    log_ratio = torch.tensor(ratios, dtype=torch.float64)
    slots = torch.arange(len(ratios)) % 3
    sequences = Sequences.of(torch.ones(len(ratios), dtype=torch.bool), slots, 3, torch.float64)
    weights = importance_weights(log_ratio, sequences, config)
    assert (weights <= high).all()
    full = importance_weights(log_ratio, sequences, config.model_copy(update={"importance": "full"}))
    within = full <= high if importance == "truncate" else (full >= low) & (full <= high)
    assert torch.equal(weights[within], full[within])
    assert torch.equal(weights[~within], torch.full_like(weights[~within], high if importance == "truncate" else 0.0))
    if level == "sequence":
        for slot in range(3):
            assert len(set(weights[slots == slot].tolist())) <= 1


def one_token(ratio: float, advantage: float, config: ObjectiveConfig):
    """(loss, gradient, statistics) of one token with this ratio to a behaviour log-prob of -1."""
    logprob = torch.tensor([-1.0 + math.log(ratio)], requires_grad=True)
    inputs = LossInputs(
        logprob, torch.tensor([-1.0]), torch.tensor([advantage]), torch.tensor([True]), torch.tensor([0]), 1
    )
    loss, _, sums = policy_loss(inputs, config)
    loss.backward()
    return loss.item(), logprob.grad.item(), Totals.of(sums.sums.tolist(), sums.maxima.tolist()).means()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, ""),  # on-policy: the policy gradient, -A
        (1.2, 2.0, -2.4, -2.4, ""),  # inside the clip
        (1.5, 2.0, -2.56, 0.0, "high"),  # a good token already far more likely: cut at 1.28
        (1.5, -2.0, 3.0, 3.0, ""),  # a bad one is still pushed down
        (0.5, 2.0, -1.0, -1.0, ""),  # a good one that became rare is pulled up
        (0.5, -2.0, 1.6, 0.0, "low"),  # a bad one already rare: cut at 0.8
    ],
)
def test_each_side_of_the_clip_by_hand(ratio, advantage, loss, grad, clipped) -> None:
    got, gradient, stats = one_token(ratio, advantage, ObjectiveConfig())
    assert got == pytest.approx(loss, rel=1e-5)
    assert gradient == pytest.approx(grad, rel=1e-5)
    assert (stats["clip_low_share"], stats["clip_high_share"]) == (clipped == "low", clipped == "high")
    assert stats["clip_share"] == bool(clipped)


def test_statistics_by_hand() -> None:
    behaviour = torch.full((4,), -1.0)
    logprobs = behaviour + torch.tensor([1.0, 2.0, 0.5, 9.0]).log()
    mask = torch.tensor([True, True, True, False])
    inputs = LossInputs(logprobs, behaviour, torch.ones(4), mask, torch.zeros(4, dtype=torch.int64), 1)
    loss, divisor, sums = policy_loss(inputs, ObjectiveConfig())
    totals = Totals.of(sums.sums.tolist(), sums.maxima.tolist())
    stats = totals.means()
    assert divisor == 3 == totals.num_loss_tokens
    assert stats["loss"] == pytest.approx(loss.item() / 3)
    assert stats["ratio_mean"] == pytest.approx(3.5 / 3)
    assert (stats["ratio_min"], stats["ratio_max"]) == pytest.approx((0.5, 2.0))
    assert (stats["ratio_p01"], stats["ratio_p99"]) == pytest.approx((0.5, 2.0), rel=0.01)
    assert stats["ess_share"] == pytest.approx(3.5**2 / (3 * (1 + 4 + 0.25)))
    assert stats["logprob_gap_mean"] == pytest.approx(2 * math.log(2) / 3)
    assert stats["logprob_gap_max"] == pytest.approx(math.log(2))
    assert stats["kl_k1"] == pytest.approx(0.0, abs=1e-6)
    # (2 - 1 - log 2) + (0.5 - 1 + log 2)
    assert stats["kl_k3"] == pytest.approx(0.5 / 3, rel=1e-5)


def test_the_shares_of_masked_and_truncated_tokens_are_reported() -> None:
    start = torch.tensor([1.0, 3.0, 0.25, 1.5]).log()
    inputs = LossInputs(
        start.clone(), torch.zeros(4), torch.ones(4), torch.ones(4, dtype=torch.bool), torch.arange(4), 4, start_T=start
    )

    def stats(**options):
        config = ObjectiveConfig(decoupled=True, importance_max=2.0, **options)
        sums = policy_loss(inputs, config)[2]
        return Totals.of(sums.sums.tolist(), sums.maxima.tolist()).means()

    truncated, masked = stats(importance="truncate"), stats(importance="mask", importance_min=0.5)
    assert (truncated["truncated_share"], truncated["masked_share"]) == (0.25, 0.0)
    assert truncated["weight_mean"] == pytest.approx((1 + 2 + 0.25 + 1.5) / 4)
    assert (masked["truncated_share"], masked["masked_share"]) == (0.0, 0.5)
    assert masked["weight_mean"] == pytest.approx((1 + 1.5) / 4)


def test_a_nan_on_the_mask_reaches_the_loss() -> None:
    assert math.isnan(one_token(float("nan"), 1.0, ObjectiveConfig())[0])


def test_an_absurd_ratio_gives_a_finite_loss_and_its_gap_is_told() -> None:
    inputs = LossInputs(
        torch.tensor([0.0]), torch.tensor([-500.0]), -torch.ones(1), torch.tensor([True]), torch.tensor([0]), 1
    )
    loss, _, sums = policy_loss(inputs, ObjectiveConfig())
    assert math.isfinite(loss.item())
    assert Totals.of(sums.sums.tolist(), sums.maxima.tolist()).means()["logprob_gap_max"] == 500.0


def test_a_micro_batch_without_sequences_adds_nothing() -> None:
    nothing = torch.zeros(2)
    inputs = LossInputs(
        nothing.clone().requires_grad_(), nothing, nothing, nothing.bool(), nothing.long(), 1, entropy_T=nothing
    )
    for name in OBJECTIVES:
        loss, divisor, sums = policy_loss(inputs, config_of(name))
        assert loss.item() == divisor.item() == 0
        assert not sums.sums.any()
        assert not sums.maxima.any()


def test_the_estimators_of_the_kl_are_near_the_true_one_on_average() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    true = (p * (p / q).log()).sum()
    log_ratio = (p / q).log()
    for estimator, tolerance in ((k1, 1e-6), (k3, 1e-6), (k2, 2e-3)):
        assert (p * estimator(log_ratio)).sum() == pytest.approx(true.item(), abs=tolerance)


def test_k3_is_zero_at_equality_and_never_negative() -> None:
    assert k3(torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    assert (k3(torch.linspace(-5, 5, 1001, dtype=torch.float64)) >= 0).all()


@pytest.mark.parametrize(
    ("kind", "weighted", "matches"), [("k1", True, True), ("k1", False, False), ("k2", False, True), ("k3", True, True)]
)
def test_which_estimators_have_the_gradient_of_the_kl_in_the_loss(kind: str, weighted: bool, matches: bool) -> None:
    """Exactly, over all tokens of a small vocabulary: on-policy, the mean gradient of the term is that of KL(p || q), or not."""
    logits = torch.tensor([0.3, -0.2, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    logq = torch.tensor([0.1, 0.5, -0.4, 0.2], dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    true = torch.autograd.grad((logp.exp() * (logp - logq)).sum(), logits, retain_graph=True)[0]
    term = {"k1": k1, "k2": k2, "k3": k3}[kind](logp - logq)
    if weighted:
        term = (logp - logp.detach()).exp() * term
    got = torch.autograd.grad((logp.detach().exp() * term).sum(), logits)[0]
    assert torch.allclose(got, true, atol=1e-12) == matches


def test_quantiles_are_found_within_a_bin_at_both_ends() -> None:
    counts = [0.0] * NUM_BINS
    counts[0], counts[-1] = 1.0, 1.0
    assert quantile(counts, 0.0) == pytest.approx(math.exp(-2.005))
    assert quantile(counts, 1.0) == pytest.approx(math.exp(2.005), rel=1e-3)
