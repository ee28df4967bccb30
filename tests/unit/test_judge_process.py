"""What the pool and a judge process agree on."""

from services.reward.judge_process import RecentlyUsed


def test_suites_are_kept_by_size_and_the_one_used_longest_ago_goes_first():
    kept: RecentlyUsed[int] = RecentlyUsed(max_bytes=100)
    for name in "abc":
        kept.put(name, 1, 30)
    assert kept.get("a") == 1
    kept.put("d", 1, 30)
    assert [kept.get(name) for name in "abcd"] == [1, None, 1, 1]


def test_a_suite_that_is_larger_than_all_room_is_kept_until_the_next_comes():
    kept: RecentlyUsed[int] = RecentlyUsed(max_bytes=100)
    kept.put("a", 1, 1000)
    assert kept.get("a") == 1
    kept.put("b", 2, 10)
    assert kept.get("a") is None
    assert kept.get("b") == 2
