"""What people see of a run, from made-up statuses."""

import io

from rich.console import Console

from services import waits
from services.view import learner_time


def test_the_learners_time_is_split_into_its_parts():
    steps = [
        {"step": 1, "time/train_s": 3.0, "time/wait_batch_s": 1.0, "time/publish_s": 0.5},
        {"step": 2, "time/train_s": 3.0, "time/wait_batch_s": 2.0, "time/publish_s": 0.5},
    ]
    assert learner_time(steps) == "60% training, 30% waiting for batches, 10% publishing"
    assert learner_time([]) == ""
    assert learner_time([{"step": 1}]) == ""


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
