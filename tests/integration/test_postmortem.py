"""``forebay postmortem`` on runs that ended in every way, and on one that lives: every role is in it, and no secret."""

from __future__ import annotations

import json
import signal
import tarfile

import pytest
from loop_harness import Run

from protocol.security import write_keys
from tests.polling import block_until

STUCK = {"rollout.fake.tokens_per_s": 0.01, "coordinator.generate_timeout_s": 100}


def archive_of(run):
    """The unpacked files of the run's post-mortem by name, and what the command printed."""
    out = run.folder / "pm.tar.gz"
    out.unlink(missing_ok=True)
    tool = run.forebay("postmortem", str(run.run_dir), "--out", str(out))
    run.assert_all_exit(tool)
    with tarfile.open(out) as archive:
        files = {m.name.partition("/")[2]: archive.extractfile(m).read().decode() for m in archive.getmembers()}
    printed = tool.log.read_text()
    assert files["README.txt"].splitlines()[0] in printed
    return files


def archive_with(run, *names):
    """The same of a live run, with reports of all of ``names``. A node that is late with its answer has it in the next archive."""
    for _ in range(20):
        files = archive_of(run)
        if reports_by_node(files).keys() >= set(names):
            return files
    raise AssertionError(f"{sorted(reports_by_node(files))}, not {names}\n{run.logs()}")


def kept_nodes(run):
    """Who is in the last status that the coordinator has kept for the time after it."""
    kept = run.run_dir / "status.json"
    return {node["node_id"] for node in json.loads(kept.read_text())["nodes"]} if kept.exists() else set()


def one_line(text):
    """Without the breaks that paragraphs are wrapped at."""
    return " ".join(text.split())


def reports_by_node(files):
    """The reports in an archive by their process's node id."""
    reports = [json.loads(text) for name, text in files.items() if name.startswith("reports/")]
    return {report["node_id"]: report for report in reports}


def test_a_run_in_which_nothing_happens_leaves_the_stacks_of_every_role_and_who_waited_on_whom(tmp_path):
    # Longer than the nodes take to start on a busy machine, or the coordinator is gone before they come.
    with Run(tmp_path, {**STUCK, "coordinator.no_progress_timeout_s": 15}) as run:
        roles = run.start_all("a", "b")
        assert roles.pop("coordinator").exit_code() == 5
        run.assert_all_exit(*roles.values())
        files = archive_of(run)
        reports = reports_by_node(files)
        assert set(reports) == {"coordinator", "judge", "a", "b", "learner"}
        assert all(report["threads"] and report["log"] and report["versions"] for report in reports.values())
        assert {f"logs/{name}.log" for name in reports} <= set(files)
        assert "Nothing has happened" in reports["coordinator"]["error"]
        readme = one_line(files["README.txt"])
        assert "The run FAILED" in readme
        assert "Failed first: coordinator (coordinator)" in readme
        assert "for the batch of step 1 from coordinator" in readme
        waits = {(wait["who"], wait["on"]) for wait in json.loads(files["waits.json"])["waits"]}
        assert ("learner", "coordinator") in waits
        assert {("coordinator", "a"), ("coordinator", "b")} & waits, "whoever has the leases"
        queue = json.loads(files["queue.json"])
        assert queue["groups"]["open"] > 0
        assert queue["oldest_groups"][0]["task_id"].startswith("t")
        assert json.loads(files["ledger.json"])["status"]["groups_admitted"] > 0
        assert json.loads(files["config.json"])["coordinator"]["no_progress_timeout_s"] == 15


def test_after_a_killed_coordinator_every_role_is_there_and_no_byte_of_a_key(tmp_path):
    key_file = tmp_path / "run.keys"
    write_keys(key_file)
    changes = {"run.key_file": str(key_file), "run.join_timeout_s": 4, "learner.fake_step_s": 0.2}
    with Run(tmp_path, {**changes, "coordinator.max_steps": 10_000}) as run:
        coordinator = run.start("coordinator")
        while not coordinator.events("serving"):  # the nodes wait 4 s for it at most
            assert coordinator.process.poll() is None, run.logs()
        nodes = [run.start("reward", "judge"), run.start("rollout", "a"), run.start("learner")]
        while len(coordinator.events("step")) < 20:
            assert coordinator.process.poll() is None, run.logs()
        block_until(lambda: kept_nodes(run) == {"judge", "a", "learner"})  # the last status of before may lack one
        secrets = [value for name, value in json.loads(key_file.read_text()).items() if "secret" in name]
        for role in run.roles:  # as a debugging print might
            with role.log.open("a") as log:
                log.write(f"keys are {key_file.read_text()}\n")
        (run.run_dir / "logs").mkdir()
        for role in run.roles:
            (run.run_dir / "logs" / f"{role.name}.log").symlink_to(role.log)
        coordinator.signal(signal.SIGKILL)
        run.assert_all_exit(*nodes, code=3)
        files = archive_of(run)
        assert {"judge", "a", "learner"} == set(reports_by_node(files))
        assert {f"logs/{name}.log" for name in ("coordinator", "judge", "a", "learner")} <= set(files)
        readme = one_line(files["README.txt"])
        assert "ended WITHOUT A WORD" in readme
        assert "has been silent for 4 s" in readme
        for name, text in files.items():
            assert not [secret for secret in secrets if secret in text], name
        assert "(removed)" in files["logs/a.log"]
        assert json.loads(files["config.json"])["run"]["key_file"] == "(removed)"
        assert len(files["metrics.jsonl"].splitlines()) >= 19, "the last one may not have been durable"
        nodes_then = json.loads(files["summary.json"])["nodes"]
        assert {node["node_id"] for node in nodes_then} == {"judge", "a", "learner"}


def test_a_node_that_was_killed_leaves_what_it_last_said(tmp_path):
    with Run(tmp_path, {**STUCK, "coordinator.no_progress_timeout_s": 120}) as run:
        roles = run.start_all("a", "b")

        def busy(status):  # the first of them that joins may have all the work
            return [n["node_id"] for n in status["nodes"] if n["node_id"] in "ab" and n["leases"] and n["counters"]]

        victim = busy(run.wait_until(busy))[0]
        roles[victim].signal(signal.SIGKILL)
        run.wait_until(lambda s: victim not in {node["node_id"] for node in s["nodes"]})
        survivor = "a" if victim == "b" else "b"
        files = archive_with(run, victim, survivor)
        reports = reports_by_node(files)
        assert "no heartbeat" in reports[victim]["gone"]
        assert reports[survivor]["threads"]
        readme = one_line(files["README.txt"])
        assert "The run is ALIVE" in readme
        assert f"{victim} (rollout): vanished" in readme


def test_a_live_run_goes_on_undisturbed(tmp_path):
    with Run(tmp_path, {"coordinator.max_steps": 6}, proxied=True) as run:
        roles = run.start_all()
        last = run.hold_commits(after=5)
        run.wait_for_step(1)
        names = {"coordinator", "judge", "a", "learner"}
        assert set(reports_by_node(archive_with(run, *names))) == names
        run.proxy.release(last)
        run.assert_all_exit(*roles.values())
        run.assert_finished()
        assert "The run finished" in archive_of(run)["README.txt"]


def test_a_damaged_journal_and_a_missing_summary_are_lines_of_the_page(tmp_path):
    with Run(tmp_path, {"coordinator.max_steps": 2}) as run:
        run.assert_all_exit(*run.start_all().values())
        journal = run.run_dir / "journal.sqlite"
        data = bytearray(journal.read_bytes())
        data[4096:] = b"\xff" * (len(data) - 4096)
        journal.write_bytes(data)
        for name in ("summary.json", "status.json", "config.json"):
            (run.run_dir / name).unlink(missing_ok=True)
        (run.run_dir / "reports").mkdir(exist_ok=True)
        (run.run_dir / "reports" / "torn-1.json").write_text('{"node_id": "torn"')
        files = archive_of(run)
        readme = one_line(files["README.txt"])
        assert "journal is damaged" in readme
        assert "torn-1.json can't be read" in readme
        assert "How the run ended is not known" in readme


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_that_is_no_run_is_refused(tmp_path, made):
    folder = tmp_path / "other"
    if made:
        folder.mkdir()
    with Run(tmp_path) as run:
        tool = run.forebay("postmortem", str(folder))
        assert tool.exit_code() == 2
        assert "is not the folder of a run" in tool.log.read_text()
