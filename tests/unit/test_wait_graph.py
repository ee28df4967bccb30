"""Circles of waits on made-up runs: real ones are found, and what only looks like one is not."""

from common.wait_graph import MAX_CYCLES, OVERLAP_S, WaitRow, cycle_text, find_cycles

ROLES = {"learner": "learner", "rollout-0": "rollout", "rollout-1": "rollout", "reward-0": "reward"}


def row(who, on, *, age_s=60.0, known_s_ago=0.5, onward=True, what="x"):
    return WaitRow(who, what, on, age_s, 100.0, "run.k", onward, 0.0 if who == "coordinator" else known_s_ago)


CIRCULAR = [  # engines wait for version v, and the learner waits for rollouts
    row("learner", "coordinator", what="the batch of step 3"),
    row("coordinator", "rollout-0", what="an engine with weights v2"),
    row("rollout-0", "learner", what="weights v2"),
]


def test_engines_that_wait_for_weights_while_the_learner_waits_for_rollouts_are_a_circle():
    cycles = find_cycles([*CIRCULAR, row("reward-0", "coordinator", onward=False)], ROLES)
    assert cycles == [["coordinator", "rollout-0", "learner", "coordinator"]]
    assert cycle_text(cycles[0]) == "cycle: coordinator -> rollout-0 -> learner -> coordinator"


def test_a_wait_on_a_role_is_one_on_each_of_its_nodes():
    rows = [CIRCULAR[0], row("coordinator", "rollout"), *(row(f"rollout-{i}", "learner") for i in (0, 1))]
    assert [cycle[1] for cycle in find_cycles(rows, ROLES)] == ["rollout-0", "rollout-1"]
    assert find_cycles(rows, {"learner": "learner"}) == [], "nobody has the role"


def test_a_wait_on_several_is_one_on_each():
    rows = [CIRCULAR[0], row("coordinator", "reward-0, rollout-0"), CIRCULAR[2]]
    assert len(find_cycles(rows, ROLES)) == 1


def test_waits_that_end_as_soon_as_the_peer_answers_make_no_circle():
    rows = [row("coordinator", "rollout-0"), row("rollout-0", "coordinator", onward=False, what="an acknowledgement")]
    assert find_cycles(rows, ROLES) == []


def test_a_chain_is_no_circle():
    assert find_cycles(CIRCULAR[:2], ROLES) == []
    assert find_cycles([], ROLES) == []


def test_news_that_a_message_has_overtaken_makes_no_circle():
    batch_came = row("coordinator", "learner", age_s=3.0, what="the commit of step 3")
    heard_before = row("learner", "coordinator", age_s=60.0, known_s_ago=3.5, what="the batch of step 3")
    heard_since = row("learner", "coordinator", age_s=60.0, known_s_ago=3.0 - OVERLAP_S)
    assert find_cycles([batch_came, heard_before], ROLES) == []
    assert len(find_cycles([batch_came, heard_since], ROLES)) == 1


def test_a_thousand_engines_in_circles_are_shown_by_some_examples():
    nodes = {f"r{i}": "rollout" for i in range(1000)}
    rows = [CIRCULAR[0], row("coordinator", "rollout"), *(row(name, "learner") for name in nodes)]
    assert len(find_cycles(rows, {**nodes, "learner": "learner"})) == MAX_CYCLES


def test_a_row_says_all_of_it():
    text = row("learner", "coordinator", what="the batch of step 3").text
    assert text == "learner waits 60 s of 100 s (run.k) for the batch of step 3 from coordinator"
    assert WaitRow(**CIRCULAR[0].as_dict()) == CIRCULAR[0]
