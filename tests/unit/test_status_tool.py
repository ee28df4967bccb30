"""What people see of a run, from made-up statuses."""

import io

import pytest
from rich.console import Console

from services.tools import status as view
from services.tools import waits
from services.tools.status import learner_time, routing


def test_the_learners_time_is_split_into_its_parts():
    steps = [
        {"step": 1, "time/train_s": 3.0, "time/wait_batch_s": 1.0, "time/weight_update_s": 0.5},
        {"step": 2, "time/train_s": 3.0, "time/wait_batch_s": 2.0, "time/weight_update_s": 0.5},
    ]
    assert learner_time(steps) == "60% training, 30% waiting for batches, 10% publishing"
    assert learner_time([]) == ""
    assert learner_time([{"step": 1}]) == ""


def test_what_replayed_routes_changed_is_shown_where_there_are_some():
    row = {"train/routing_replayed_share": 1.0, "train/routing_changed_share": 0.0312}
    assert routing(row) == "routed_experts replayed: 100.0% of the tokens; other experts than the trainer's own: 3.1%"
    assert routing(row | {"train/routing_changed_share": 0.0}).endswith("0.0%")
    assert "own: -" in routing({"train/routing_replayed_share": 1.0})
    assert routing({}) == ""


def test_waits_are_a_table_with_what_is_left_and_circles_below():
    wait = {"who": "learner", "what": "the batch of step 3", "on": "coordinator", "age_s": 60.0, "deadline_s": 50.0}
    status = {
        "run_id": "r",
        "state": "running",
        "version": 2,
        "waits": [{**wait, "limit_key": "run.idle_timeout_s", "onward": True, "known_s_ago": 0.0}],
        "cycles": [["coordinator", "a", "learner", "coordinator"]],
    }
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(waits.render(status))
    text = console.export_text()
    for words in ("the batch of step 3", "60.0 s", "10 s over", "run.idle_timeout_s"):
        assert words in text
    assert "cycle: coordinator -> a -> learner -> coordinator" in text
    console.print(waits.render(status | {"waits": [], "cycles": []}))
    assert "Nobody waits." in console.export_text()


def status_with(**changes):
    names = "trained buffered in_flight filtered failed duplicate lost groups_trained groups_filtered groups_failed"
    ledger = dict.fromkeys(names.split(), 0)
    ledger |= {"generated": 30, "trained": 10, "buffered": 20, "groups_admitted": 3, "groups_trained": 1}
    return {"ledger": ledger | changes, "groups": {"open": 1, "ready": 1, "batched": 0}}


@pytest.mark.parametrize(
    ("changes", "rest"),
    [({}, (0, 0)), ({"lost": 5}, (-5, 0)), ({"generated": 31}, (1, 0)), ({"groups_failed": 1}, (0, -1))],
)
def test_a_ledger_that_does_not_close_is_shown_as_such(changes, rest):
    status = status_with(**changes)
    assert view.unaccounted(status) == rest
    console = Console(width=100, file=io.StringIO())
    console.print(view._ledger(status), view._ledger_line(status))
    text = console.file.getvalue()
    assert ("DOES NOT CLOSE" in text) == (rest != (0, 0))
    assert ("closes: every generated token and every group" in text) == (rest == (0, 0))
