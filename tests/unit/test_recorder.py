"""A process's report: what is in it, how big it gets, and that leaving it never makes things worse."""

import asyncio
import json
import threading

import pytest

import common.logs
from common.errors import ConfigError, PeerError
from common.recorder import MAX_REPORT_BYTES, RING_LINES, Recorder
from common.waits import WaitTable


def failed(error):
    try:
        raise error
    except type(error) as caught:
        return caught


@pytest.fixture
def recorder(tmp_path):
    recorder = Recorder()
    config = {"run": {"key_file": "secret.keys", "seed": 1}}
    recorder.describe("rollout", run_dir=tmp_path, config=config, node_id="r-0", waits=WaitTable())
    return recorder


def test_a_report_has_error_waits_stacks_log_versions_and_config(recorder):
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="the-stuck-one")
    thread.start()
    recorder.keep(None, "info", {"event": "hello", "token": "abcdef123"})
    with recorder.waits.named("weights v3", on="learner", timeout_s=9, limit_key="run.weight_update_timeout_s"):
        path = recorder.write(failed(PeerError("The coordinator is gone.")))
    release.set()
    thread.join()
    report = json.loads(path.read_text())
    assert path.parent.name == "reports"
    assert path.name.startswith("r-0-")
    assert report["error"] == "The coordinator is gone."
    assert "raise error" in report["traceback"]
    assert [(wait["what"], wait["on"], wait["deadline_s"]) for wait in report["waits"]] == [
        ("weights v3", "learner", 9)
    ]
    stack = next(text for name, text in report["threads"].items() if name.startswith("the-stuck-one"))
    assert "wait" in stack
    assert [json.loads(line)["event"] for line in report["log"]] == ["hello"]
    assert "abcdef123" not in path.read_text()
    assert report["config"]["run"] == {"key_file": "(removed)", "seed": 1}
    assert {"python", "forebay"} <= set(report["versions"])


def test_the_first_error_is_the_one_that_is_kept(recorder):
    path = recorder.write(failed(PeerError("first")))
    assert recorder.write(failed(PeerError("second"))) is None
    assert json.loads(path.read_text())["error"] == "first"


def test_a_process_that_could_not_begin_leaves_no_report(recorder):
    assert recorder.write(failed(ConfigError("Another coordinator has the journal open."))) is None


def test_the_log_is_a_ring_and_a_report_has_a_bound(recorder):
    for number in range(3 * RING_LINES):
        recorder.keep(None, "info", {"event": str(number), "text": "x" * 10_000})
    data = recorder.report_bytes()
    assert len(data) <= MAX_REPORT_BYTES
    lines = json.loads(data)["log"]
    assert 0 < len(lines) <= RING_LINES
    assert lines[-1].startswith(f'{{"event": "{3 * RING_LINES - 1}"')


def test_without_the_runs_folder_nothing_is_written_and_nothing_raised(tmp_path):
    recorder = Recorder()
    assert recorder.write(failed(PeerError("x"))) is None
    recorder.describe("rollout", run_dir=tmp_path / "elsewhere")
    assert recorder.write(failed(PeerError("x"))) is None
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_can_not_be_written_is_said_and_no_error(tmp_path, capsys):
    recorder = Recorder()
    recorder.describe("rollout", run_dir=tmp_path)
    (tmp_path / "reports").write_text("a file where a folder should be")
    assert recorder.write(failed(PeerError("x"))) is None
    assert "could not be written" in capsys.readouterr().err


async def test_tasks_are_listed_with_the_place_where_they_wait(recorder):
    task = asyncio.create_task(asyncio.sleep(60), name="the sleeper")
    await asyncio.sleep(0)
    recorder.describe("rollout")
    assert any(line.startswith("the sleeper: sleep ") for line in recorder.report()["tasks"])
    task.cancel()


def test_the_log_goes_through_the_recorder(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(common.logs, "RECORDER", recorder)
    common.logs.setup("test", json=True, run="r").info("something", number=3)
    event = json.loads(recorder.report()["log"][0])
    assert (event["event"], event["role"], event["number"]) == ("something", "test", 3)
