"""What becomes of a batch: shaping, advantages, and what is left out."""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import TrainingError
from protocol.messages import Batch, BatchSample
from protocol.versions import Segment
from services.learner.batch_samples import make_train_batch, to_train_samples
from services.learner.config import ObjectiveConfig


def make_batch(groups: list[list[tuple[float, int, bool]]]) -> tuple[Batch, dict]:
    """Groups of (reward, completion tokens, truncated); sample i has the token i throughout."""
    samples, completions, prompts = [], [], []
    for group_id, members in enumerate(groups, start=10):
        for index, (reward, length, truncated) in enumerate(members):
            samples.append(
                BatchSample(
                    group_id=group_id,
                    sample_index=index,
                    reward=reward,
                    segments=[Segment(version=0, num_tokens=length)],
                    num_prompt_tokens=2,
                    num_completion_tokens=length,
                    truncated=truncated,
                )
            )
            prompts.append(np.full(2, group_id, np.int32))
            completions.append(np.full(length, len(completions), np.int32))
    ids = np.concatenate(completions)
    arrays = {
        "prompt_ids": np.concatenate(prompts),
        "completion_ids": ids,
        "logprobs": np.full(len(ids), -1.0, np.float32),
    }
    return Batch(step=3, samples=samples), arrays


def test_each_sample_gets_its_own_routes() -> None:
    batch, arrays = make_batch([[(1.0, 2, False), (0.0, 3, False)]])
    assert [sample.routed_experts for sample in make_train_batch(batch, arrays, ObjectiveConfig()).samples] == [
        None,
        None,
    ]
    arrays["routed_experts"] = np.arange(7, dtype=np.uint8)[:, None, None]  # 2 + 2 - 1 and 2 + 3 - 1 rows
    given = make_train_batch(batch, arrays, ObjectiveConfig())
    assert [sample.routed_experts.ravel().tolist() for sample in given.samples] == [[0, 1, 2], [3, 4, 5, 6]]


def test_groups_without_signal_are_left_out_and_their_share_is_reported() -> None:
    batch, arrays = make_batch([[(1.0, 2, False), (0.0, 3, False)], [(1.0, 2, False), (1.0, 2, False)]])
    given = make_train_batch(batch, arrays, ObjectiveConfig())
    assert [sample.advantage for sample in given.samples] == [1.0, -1.0]
    assert [sample.completion_ids.tolist() for sample in given.samples] == [[0, 0], [1, 1, 1]]
    assert given.samples[1].name == "sample 1 of group 10"
    assert given.metrics["batch/no_signal_groups"] == 0.5
    assert given.metrics["batch/trained_samples"] == 2
    assert (given.metrics["batch/advantage_mean"], given.metrics["batch/advantage_std"]) == (0.0, 1.0)


def test_a_batch_in_which_no_group_has_a_signal_trains_nothing_and_says_so() -> None:
    batch, arrays = make_batch([[(0.0, 2, False)] * 4, [(1.0, 2, False)] * 4])
    given = make_train_batch(batch, arrays, ObjectiveConfig())
    assert given.samples == []
    assert given.metrics["batch/no_signal_groups"] == 1.0
    assert "batch/advantage_mean" not in given.metrics


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo", "reinforce_pp"])
def test_groups_without_signal_change_nothing_for_the_others(kind: str) -> None:
    groups = [[(1.0, 2, False), (0.0, 3, False)], [(0.5, 2, False), (0.0, 2, False)]]
    objective = ObjectiveConfig(advantage=kind)
    alone = to_train_samples(*make_batch(groups), objective)
    beside = to_train_samples(*make_batch([*groups, [(1.0, 4, False)] * 6]), objective)
    assert [sample.advantage for sample in beside] == [sample.advantage for sample in alone]


def test_a_truncated_completion_is_filtered_but_its_reward_still_counts_in_its_group() -> None:
    groups = [[(1.0, 2, False), (0.0, 8, True), (0.5, 2, False)]]
    plain = to_train_samples(*make_batch(groups), ObjectiveConfig(advantage="dr_grpo"))
    filtered = make_train_batch(*make_batch(groups), ObjectiveConfig(advantage="dr_grpo", overlong_filter=True))
    assert [sample.advantage for sample in plain] == [0.5, -0.5, 0.0]
    assert [sample.advantage for sample in filtered.samples] == [0.5, 0.0]
    assert filtered.metrics["batch/overlong_filtered"] == pytest.approx(1 / 3)


def test_what_is_filtered_steers_the_others_by_its_reward_alone() -> None:
    objective = ObjectiveConfig(overlong_filter=True)
    short = to_train_samples(*make_batch([[(1.0, 2, False), (0.0, 3, True)]]), objective)
    long = to_train_samples(*make_batch([[(1.0, 2, False), (0.0, 90, True)]]), objective)
    assert [sample.advantage for sample in short] == [sample.advantage for sample in long]


def test_the_overlong_penalty_grows_over_the_buffer_and_makes_a_signal() -> None:
    batch, arrays = make_batch([[(0.0, 4, False), (0.0, 9, False), (0.0, 10, True)]])
    objective = ObjectiveConfig(advantage="dr_grpo", overlong_buffer=4, overlong_penalty=0.5)
    given = make_train_batch(batch, arrays, objective, max_completion_tokens=10)
    # 0, -0.5 * 3/4, -0.5: mean -0.2917
    np.testing.assert_allclose([s.advantage for s in given.samples], [0.2917, -0.0833, -0.2083], atol=1e-4)
    assert given.metrics["batch/overlong_penalty"] == pytest.approx(-0.875 / 3)


@pytest.mark.parametrize(
    ("kind", "value"), [("k1", np.log(2)), ("k2", np.log(2) ** 2 / 2), ("k3", 0.5 - 1 + np.log(2))]
)
def test_the_kl_in_the_reward_is_the_sum_over_the_completion(kind: str, value: float) -> None:
    batch, arrays = make_batch([[(1.0, 2, False), (1.0, 6, False)]])
    objective = ObjectiveConfig(advantage="dr_grpo", kl_coef=0.1, kl_in="reward", kl_kind=kind)

    def reference(samples):
        return [
            sample.logprobs - np.float32(np.log(2)) for sample in samples
        ]  # the policy is twice as sure of each token

    given = make_train_batch(batch, arrays, objective, reference_logprobs=reference)
    half = 0.1 * value * (6 - 2) / 2
    np.testing.assert_allclose([s.advantage for s in given.samples], [half, -half], rtol=1e-5)
    assert given.metrics["batch/kl_reference"] == pytest.approx(value, rel=1e-5)


def test_without_a_kl_the_reference_is_not_asked() -> None:
    def reference(samples):
        raise AssertionError

    batch, arrays = make_batch([[(1.0, 2, False), (0.0, 2, False)]])
    assert make_train_batch(batch, arrays, ObjectiveConfig(), reference_logprobs=reference).samples
    in_loss = ObjectiveConfig(kl_coef=0.1)
    assert make_train_batch(batch, arrays, in_loss, reference_logprobs=reference).samples


def test_a_reward_that_is_not_finite_is_refused_and_its_sample_named() -> None:
    batch, arrays = make_batch([[(1.0, 2, False), (float("nan"), 2, False)]])
    with pytest.raises(TrainingError, match=r"Step 3: sample 1 of group 10 has the reward nan. Nothing was updated"):
        to_train_samples(batch, arrays, ObjectiveConfig())


def test_a_log_prob_that_is_not_finite_is_no_missing_signal() -> None:
    batch, arrays = make_batch([[(1.0, 2, False), (0.0, 2, False)], [(1.0, 2, False), (0.0, 2, False)]])
    arrays["logprobs"][2] = np.nan
    objective = ObjectiveConfig(kl_coef=0.1, kl_in="reward")
    reference = lambda samples: [np.full(2, -1.0, np.float32) for _ in samples]  # noqa: E731
    with pytest.raises(TrainingError, match=r"Step 3: sample 1 of group 10 has the KL to the start model \(k3\) nan"):
        make_train_batch(batch, arrays, objective, reference_logprobs=reference)
