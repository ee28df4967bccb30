"""``forebay reward --once``: order, memory, bad lines, interruptions. The judge is a fake one in the same process."""

import errno
import json
import os
import random
import threading
import time
from concurrent.futures import Future

import pytest

from common.errors import ConfigError, ForebayError
from protocol.verdicts import JudgeResult, Verdict
from services.reward.config import RewardConfig
from services.reward.lines import LineReader, LineWriter
from services.reward.public_format import MAX_LINE_BYTES
from services.tools import judge_file as once

SUITE = {"kind": "asserts", "entry_point": "f", "code": "assert f(1) == 1"}
VERDICTS = {"good": Verdict.ACCEPTED, "bad": Verdict.WRONG_ANSWER, "infra": Verdict.INFRA_ERROR}


class Pool:
    """Judges by the completion's text, each in a thread, in a random order; counts what is in hand."""

    isolation = "pretended"
    on_submit = staticmethod(lambda pool, completion: None)
    pools = []

    def __init__(self, config):
        self.judged, self.in_hand, self.most_in_hand, self.lock = [], 0, 0, threading.Lock()
        self.random = random.Random(0)
        Pool.pools.append(self)

    def start(self):
        pass

    def close(self):
        pass

    def submit(self, completion, suite):
        self.on_submit(self, completion)
        future = Future()
        with self.lock:
            self.judged.append(completion)
            self.in_hand += 1
            self.most_in_hand = max(self.most_in_hand, self.in_hand)
        threading.Timer(self.random.random() * 0.01, self.finish, (completion, future)).start()
        return future

    def finish(self, completion, future):
        with self.lock:
            self.in_hand -= 1
        verdict = VERDICTS[completion.split()[0]]
        future.set_result(JudgeResult(verdict=verdict, reward=None if verdict is Verdict.INFRA_ERROR else 1.0))


@pytest.fixture(autouse=True)
def pools(monkeypatch):
    monkeypatch.setattr(once, "JudgePool", Pool)
    monkeypatch.setattr(Pool, "pools", [])
    return Pool.pools


def lines(*completions):
    return "".join(
        json.dumps({"id": i, "completion": text, "tests": SUITE}) + "\n" for i, text in enumerate(completions)
    )


def run(tmp_path, text, workers=2, out="out.jsonl"):
    (tmp_path / "in.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    return once.main(RewardConfig(workers=workers), str(tmp_path / "in.jsonl"), str(tmp_path / out))


def answers(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_come_in_the_order_of_the_input_and_the_window_is_bounded(tmp_path, pools, capsys):
    assert run(tmp_path, lines(*(f"good {n}" if n % 3 else f"bad {n}" for n in range(200)))) == 0
    found = answers(tmp_path / "out.jsonl")
    assert [answer["id"] for answer in found] == list(range(200))
    assert [answer["verdict"] for answer in found] == ["accepted" if n % 3 else "wrong_answer" for n in range(200)]
    assert pools[0].most_in_hand <= 8
    assert not (tmp_path / "out.jsonl.partial").exists()
    summary = capsys.readouterr().err
    assert "accepted" in summary
    assert "133" in summary
    assert "200 lines in" in summary


def test_a_slow_job_at_the_head_holds_up_the_window_and_no_more(tmp_path, monkeypatch, pools):
    monkeypatch.setattr(once, "_WINDOW", 20)
    gate = threading.Event()
    finish = Pool.finish

    def slow_head(self, completion, future):
        if completion == "good head":
            assert gate.wait(20)
        finish(self, completion, future)

    def open_gate_at_20(pool, completion):
        if len(pool.judged) == 19:
            gate.set()
        assert len(pool.judged) <= 19 or gate.is_set()

    monkeypatch.setattr(Pool, "finish", slow_head)
    monkeypatch.setattr(Pool, "on_submit", staticmethod(open_gate_at_20))
    assert run(tmp_path, lines("good head", *["good"] * 60)) == 0
    assert len(answers(tmp_path / "out.jsonl")) == 61


def test_bad_lines_are_answered_in_place_and_say_which_line_they_are(tmp_path):
    text = (
        lines("good")
        + '\n{"id": "x"\n'
        + lines("bad")
        + '{"id": "y"}\n'
        + '{"id": 9, "completion": "good", "tests": 3}'
    )
    assert run(tmp_path, text) == 8
    found = answers(tmp_path / "out.jsonl")
    assert [answer["verdict"] for answer in found] == ["accepted", "infra_error", "wrong_answer", *["infra_error"] * 2]
    assert [answer["id"] for answer in found] == [0, None, 0, "y", 9]
    assert found[1]["message"].endswith("(line 3)")
    assert found[3]["message"] == "completion: this field is missing (line 5)"
    assert found[4]["message"].startswith("tests: must be an object")


def test_a_line_over_the_limit_is_refused_and_the_next_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(once, "MAX_LINE_BYTES", 2 << 20)
    assert run(tmp_path, "x" * (5 << 20) + "\n" + lines("good") + "y" * (3 << 20)) == 8
    assert [answer["verdict"] for answer in answers(tmp_path / "out.jsonl")] == [
        "infra_error",
        "accepted",
        "infra_error",
    ]


def test_an_empty_input_makes_an_empty_output(tmp_path):
    assert run(tmp_path, "") == 0
    assert (tmp_path / "out.jsonl").read_bytes() == b""


def test_a_judge_that_fails_is_an_exit_code_of_its_own(tmp_path):
    assert run(tmp_path, lines("good", "infra", "good")) == 8


def stop_at(count, signum=15):
    def on_submit(pool, completion):
        if len(pool.judged) == count:
            os.kill(os.getpid(), signum)

    return staticmethod(on_submit)


@pytest.mark.parametrize(("signum", "code"), [(2, 130), (15, 143)])
def test_after_a_signal_the_next_run_goes_on_and_judges_nothing_twice(tmp_path, monkeypatch, pools, signum, code):
    texts = [f"good {n}" for n in range(100)]
    monkeypatch.setattr(Pool, "on_submit", stop_at(40, signum))
    assert run(tmp_path, lines(*texts)) == code
    assert not (tmp_path / "out.jsonl").exists()
    done = answers(tmp_path / "out.jsonl.partial")
    assert [answer["id"] for answer in done] == list(range(len(pools[0].judged)))
    monkeypatch.setattr(Pool, "on_submit", stop_at(-1))
    assert run(tmp_path, lines(*texts)) == 0
    assert [answer["id"] for answer in answers(tmp_path / "out.jsonl")] == list(range(100))
    assert sorted(pools[0].judged + pools[1].judged) == sorted(texts)


def test_an_infra_error_that_the_signal_caused_is_left_to_the_next_run(tmp_path, monkeypatch):
    monkeypatch.setattr(Pool, "on_submit", stop_at(3))
    assert run(tmp_path, lines("good", "good", "good", "infra", "good", "good")) == 143
    monkeypatch.setattr(Pool, "on_submit", stop_at(-1))
    assert all(answer["verdict"] == "accepted" for answer in answers(tmp_path / "out.jsonl.partial"))


def test_what_a_killed_run_left_is_used_up_to_its_last_whole_line(tmp_path, pools):
    text = lines("good a", "good b", "good c")
    assert run(tmp_path, text) == 0
    whole = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").unlink()
    first = whole.index(b"\n") + 1
    (tmp_path / "out.jsonl.partial").write_bytes(whole[: first + 20])
    assert run(tmp_path, text) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    assert pools[1].judged == ["good b", "good c"]


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (b'{"id": 5, "verdict": "accepted"}\n', r"is of another input: its answer 1 is for id 5, but line 1 .* has 0"),
        (b"somebody's notes\n", r"Line 1 of .* is no answer"),
        (b'{"id": 0, "verdict": "accepted"}\n' * 2, r"more answers than the input has lines|is for id 0"),
    ],
)
def test_a_partial_file_of_another_input_is_refused_and_kept(tmp_path, left, words):
    (tmp_path / "out.jsonl.partial").write_bytes(left)
    with pytest.raises(ConfigError, match=words):
        run(tmp_path, lines("good"))
    assert (tmp_path / "out.jsonl.partial").read_bytes() == left


def test_a_full_disk_is_said_and_what_was_done_is_kept(tmp_path, monkeypatch):
    real, room = os.write, [3000]

    def write(fd, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = real(fd, data[: room[0]])
        room[0] -= count
        return count

    texts = ["good"] * 40
    monkeypatch.setattr("services.reward.lines.os.write", write)
    with pytest.raises(ForebayError, match=r"out\.jsonl\.partial can't be written: No space left.*goes on from there"):
        run(tmp_path, lines(*texts))
    kept = (tmp_path / "out.jsonl.partial").read_bytes()
    assert kept.endswith(b"\n")
    monkeypatch.undo()
    monkeypatch.setattr(once, "JudgePool", Pool)
    assert run(tmp_path, lines(*texts)) == 0
    assert (tmp_path / "out.jsonl").read_bytes().startswith(kept)
    assert len(answers(tmp_path / "out.jsonl")) == 40


def test_a_device_is_written_as_it_is_and_never_replaced(tmp_path):
    before = os.stat("/dev/null")
    (tmp_path / "in.jsonl").write_text(lines("good"))
    assert once.main(RewardConfig(workers=1), str(tmp_path / "in.jsonl"), "/dev/null") == 0
    assert os.stat("/dev/null").st_rdev == before.st_rdev
    with pytest.raises(ForebayError, match="/dev/full can't be written: No space left"):
        once.main(RewardConfig(workers=1), str(tmp_path / "in.jsonl"), "/dev/full")


def test_two_runs_do_not_write_one_file(tmp_path):
    first = LineWriter(str(tmp_path / "out.jsonl"))
    with pytest.raises(ConfigError, match="Another process is writing"):
        run(tmp_path, lines("good"))
    first.close()


def test_files_that_can_not_be_used_are_named(tmp_path):
    config = RewardConfig(workers=1)
    with pytest.raises(ConfigError, match=r"gone\.jsonl can't be read: No such file"):
        once.main(config, str(tmp_path / "gone.jsonl"), "-")
    (tmp_path / "in.jsonl").write_text("")
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        once.main(config, str(tmp_path), "-")
    with pytest.raises(ConfigError, match=r"no/out\.jsonl can't be written"):
        once.main(config, str(tmp_path / "in.jsonl"), str(tmp_path / "no" / "out.jsonl"))
    with pytest.raises(ConfigError, match="are the same file"):
        once.main(config, str(tmp_path / "in.jsonl"), str(tmp_path / "in.jsonl"))


def test_a_producer_that_waits_for_an_answer_gets_it(tmp_path):
    """As a coprocess: the next line comes only after the answer to the last."""
    os.mkfifo(tmp_path / "in")
    os.mkfifo(tmp_path / "out")
    codes = []
    config = RewardConfig(workers=1)

    def produce():
        with (tmp_path / "in").open("w") as to, (tmp_path / "out").open() as answers_from:
            for line in lines("good", "bad").splitlines():
                to.write(line + "\n")
                to.flush()
                codes.append(json.loads(answers_from.readline())["verdict"])

    producer = threading.Thread(target=produce)
    producer.start()
    assert once.main(config, str(tmp_path / "in"), str(tmp_path / "out")) == 0
    producer.join()
    assert codes == ["accepted", "wrong_answer"]


def test_lines_are_the_same_wherever_the_reads_cut_them(tmp_path, monkeypatch):
    monkeypatch.setattr("services.reward.lines._CHUNK", 3)
    (tmp_path / "in").write_bytes(b"\n\nab\nabcdef\n\nx")
    reader = LineReader(str(tmp_path / "in"), max_line_bytes=MAX_LINE_BYTES, wake=lambda: None)
    found = []
    while not reader.ended:
        found += [item] if (item := reader.take()) else []
        time.sleep(0)
    assert found == list(enumerate([b"", b"", b"ab", b"abcdef", b"", b"x"], start=1))
