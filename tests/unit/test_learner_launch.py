"""The launcher of a learner's ranks: environment, exit codes, signals, and that nothing is left. The ranks are shells."""

from __future__ import annotations

import doctest
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.errors import ConfigError
from services.learner import launch
from services.learner.launch import Place
from tests.polling import block_until

ROOT = Path(__file__).resolve().parents[2]


def ranks(script: str, place: Place | None = None) -> int:
    """The world's exit code."""
    return launch.launch(["sh", "-c", script], place or Place(2))


def here(folder: Path) -> str:
    """``folder`` as a shell reads it: TMPDIR may have blanks."""
    return shlex.quote(str(folder))


def start(script: str) -> subprocess.Popen[bytes]:
    """A launcher of two ranks, as a process of its own; returns when both have made their file."""
    command = [sys.executable, "-m", "services.learner.launch", "--ranks", "2", "--", "sh", "-c", script]
    return subprocess.Popen(command, cwd=ROOT)


def test_the_examples_of_the_exit_code_hold() -> None:
    assert doctest.testmod(launch) == (0, 1)


def test_a_rank_finds_its_place_and_rank_0_the_socket_of_its_store(tmp_path: Path) -> None:
    script = f"echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR > {here(tmp_path)}/$RANK; echo $MASTER_PORT > {here(tmp_path)}/port$RANK"
    assert ranks(f"{script}; test $RANK = 1 || test -S /proc/self/fd/$FOREBAY_STORE_FD") == 0
    assert [(tmp_path / name).read_text() for name in "01"] == ["0 0 2 2 127.0.0.1\n", "1 1 2 2 127.0.0.1\n"]
    assert (tmp_path / "port0").read_text() == (tmp_path / "port1").read_text()
    (tmp_path / "0").unlink()
    assert ranks(script, Place(ranks=2, nodes=3, node_rank=2, master="host-0:29500")) == 0
    assert [(tmp_path / name).read_text() for name in "45"] == ["4 0 6 2 host-0\n", "5 1 6 2 host-0\n"]
    assert not (tmp_path / "0").exists()


def test_the_world_ends_with_the_code_of_the_rank_that_failed_and_not_of_those_that_lost_it(capfd) -> None:
    assert ranks("exit 0") == 0
    assert ranks("test $RANK = 0 && exit 1; sleep 0.5; exit 7") == 7, "though the other one ended first"
    assert ranks("test $RANK = 0 && exit 3; sleep 0.2; exit 1") == 3
    assert ranks("exit 1") == 1
    capfd.readouterr()
    assert ranks("test $RANK = 1 && kill -9 $$; sleep 0.2; exit 1") == 128 + 9
    assert "error: Rank 1 of the learner was killed by SIGKILL" in capfd.readouterr().err


def test_a_rank_that_does_not_end_after_another_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "FAILED_GRACE_S", 0.2)
    monkeypatch.setattr(launch, "DONE_GRACE_S", 0.2)
    script = f"echo $$ > {here(tmp_path)}/$RANK; mv {here(tmp_path)}/$RANK {here(tmp_path)}/pid$RANK; test $RANK = 1 && kill -STOP $$; until test -e {here(tmp_path)}/pid1; do sleep 0.05; done"
    for code in (5, 1, 0):
        assert ranks(f"{script}; exit {code}") == (code or 1), "the world is not well, whatever the other rank says"
        assert not Path(f"/proc/{(tmp_path / 'pid1').read_text().strip()}").exists()
        (tmp_path / "pid1").unlink()


def test_a_stop_goes_to_the_ranks_and_the_world_ends_with_rank_0s_answer(tmp_path: Path) -> None:
    orderly = f'trap "exit 143" TERM; test $RANK = 1 && trap "" TERM; touch {here(tmp_path)}/$RANK; '
    orderly += f"until test -e {here(tmp_path)}/over; do sleep 0.05; done; exit 0"
    launcher = start(orderly)
    block_until(lambda: (tmp_path / "0").exists() and (tmp_path / "1").exists())
    launcher.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert launcher.poll() is None, "rank 1 ends when it is done"
    (tmp_path / "over").touch()
    assert launcher.wait(60) == 143


def test_no_rank_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    launcher = start(
        f"trap '' TERM INT; echo $$ > {here(tmp_path)}/$RANK; mv {here(tmp_path)}/$RANK {here(tmp_path)}/pid$RANK; sleep 600 & wait"
    )
    pids = [tmp_path / "pid0", tmp_path / "pid1"]
    block_until(lambda: all(path.exists() for path in pids))
    launcher.kill()
    launcher.wait()
    block_until(lambda: not any(Path(f"/proc/{path.read_text().strip()}").exists() for path in pids))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Place(ranks=0), "--ranks 0"),
        (Place(ranks=1, nodes=2, node_rank=2, master="a:1"), "from 0 to nodes - 1"),
        (Place(ranks=1, nodes=2), "needs --master HOST:PORT"),
        (Place(ranks=1, nodes=2, master="a"), "needs --master HOST:PORT"),
        (Place(ranks=2, master="a:1"), "One of a single machine finds its own"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(place: Place, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ranks("exit 0", place)


def test_a_port_that_is_taken_and_a_world_within_a_world_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.create_server(("", 0)) as taken:
        master = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match="Give --master a free port"):
            ranks("exit 0", Place(ranks=1, nodes=2, master=master))
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(launch.STOPS), "or nobody could stop this process"
    monkeypatch.setitem(os.environ, "RANK", "3")
    with pytest.raises(ConfigError, match="is rank 3 of a world already"):
        ranks("exit 0")
