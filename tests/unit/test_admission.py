"""The staleness bound, by random simulation of the two functions that promise it."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.coordinator.core.admission import max_admitted, select_batch


@settings(max_examples=300)
@given(
    seed=st.integers(0, 10_000),
    groups_per_step=st.integers(1, 6),
    max_staleness=st.integers(0, 4),
    window_share=st.floats(0, 1),
    fail_rate=st.floats(0, 0.4),
)
def test_no_group_is_ever_trained_later_than_the_cap(seed, groups_per_step, max_staleness, window_share, fail_rate):
    rng = random.Random(seed)
    window = int(window_share * max_staleness * groups_per_step)
    version, trained, next_id = 0, 0, 0
    admitted_at: dict[int, int] = {}
    ready: dict[int, bool] = {}
    overtaken: dict[int, int] = {}
    for _ in range(600):
        room = max_admitted(version, groups_per_step=groups_per_step, max_staleness=max_staleness, bypass_window=window)
        while trained + len(ready) < room:
            admitted_at[next_id], ready[next_id], overtaken[next_id] = version, False, 0
            next_id += 1
        unready = [group for group, is_ready in ready.items() if not is_ready]
        if unready:
            chosen = rng.choice(unready)
            if rng.random() < fail_rate:
                del ready[chosen], overtaken[chosen]
            else:
                ready[chosen] = True
        ids = sorted(ready)
        batch = select_batch(
            ids,
            [ready[i] for i in ids],
            [overtaken[i] for i in ids],
            groups_per_step=groups_per_step,
            bypass_window=window,
        )
        if batch is None:
            continue
        for group in batch:
            assert 0 <= version - admitted_at[group] <= max_staleness
        for group in ids:
            overtaken[group] += sum(other > group for other in batch) if group not in batch else 0
            assert group in batch or overtaken[group] <= window
        for group in batch:
            del ready[group], overtaken[group]
        trained += len(batch)
        version += 1
    assert version > 0


def test_staleness_zero_admits_exactly_one_step_at_a_time():
    assert [max_admitted(v, groups_per_step=8, max_staleness=0, bypass_window=0) for v in (0, 1, 5)] == [8, 16, 48]


@pytest.mark.parametrize(
    ("ready", "overtaken", "window", "expected"),
    [
        ([True, True, True], [0, 0, 0], 0, [10, 11]),
        ([False, True, True], [0, 0, 0], 0, None),  # nobody may pass
        ([False, True, True], [0, 0, 0], 2, [11, 12]),
        ([False, True, True], [1, 0, 0], 2, None),  # one passed before: only one more may
        ([True, False, True], [0, 0, 0], 1, [10, 12]),
        ([True, False, False], [0, 0, 0], 5, None),
    ],
)
def test_batch_selection_by_hand(ready, overtaken, window, expected):
    assert select_batch([10, 11, 12], ready, overtaken, groups_per_step=2, bypass_window=window) == expected
