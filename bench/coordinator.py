"""The coordinator's throughput: real messages over loopback TCP, real journal, one core for it and one for everybody else.

    python -m bench.coordinator [--seconds 10] [--rounds 5] [--samples N] [--against TREE] [--only-first]

A load process speaks the wire protocol as up to 16 rollout nodes, as many reward nodes and a learner: generate lease -> sample results with token
ids and log-probs -> score leases -> verdicts -> batch -> commit. It prepares its frames once, so that one core of it keeps up. Printed:
samples a second, the coordinator's own CPU time for a sample, and two latencies: from sending a result to its acknowledgement (it is
durable then), and from a result to the score lease that it causes. ``--samples`` runs on until so many samples are trained, and prints
the coordinator's memory and its journal's size on the way. ``--against`` measures the coordinator of another working tree of this project,
too, in turn with this one's, and prints the ratios of the medians: on a machine that others use nothing else says much. Linux only
(affinity, /proc).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import msgpack
import numpy as np
import zmq

from protocol.codec import decode, encode, peek, seal
from protocol.messages import (
    PROTOCOL_VERSION,
    BatchRequest,
    Heartbeat,
    Hello,
    SampleResult,
    ScoreResult,
    StepCommitted,
    StopRequest,
)
from protocol.verdicts import JudgeResult, TestResult, Verdict
from protocol.versions import Segment, VersionTag

RUN_ID = "bench"
GROUP_SIZE = 8
GROUPS_PER_STEP = 64
NUM_NODES = 16  # of rollout, and of reward
BEAT_S = 1.0
CHECKPOINT_STEPS = 20  # of the learner: samples of older steps leave the journal
HERE = Path(__file__).resolve().parents[1]
_TICKS = os.sysconf("SC_CLK_TCK")


def quantile(values: list[float], share: float) -> float:
    """The value below which ``share`` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Peer:
    """One DEALER socket with what it has open."""

    socket: zmq.Socket[bytes]
    node_id: str
    seq: int = 0
    generated: int = 0
    sent_at: dict[int, float] = field(default_factory=dict)  # request -> when

    def send(self, frames: list[Any]) -> None:
        """Frames of one message."""
        self.socket.send_multipart(frames, copy=False)

    def say(self, message: Any) -> None:
        """Through the package's own encoder."""
        self.seq += 1
        self.send(encode(message, run_id=RUN_ID, seq=self.seq))


class Load:
    """All nodes of the run in one thread."""

    def __init__(self, address: str, *, num_tokens: int, capacity: int, num_nodes: int = NUM_NODES) -> None:
        self.context = zmq.Context()
        self.num_tokens, self.capacity = num_tokens, capacity
        self.version = 0
        self.num_trained = 0
        self.num_sent = 0
        self.ack_s: list[float] = []
        self.lease_s: list[float] = []
        self._result_at: dict[tuple[int, int], float] = {}
        rng = np.random.default_rng(0)
        prompt = rng.integers(0, 32000, 200, dtype=np.int32)
        completion = rng.integers(0, 32000, num_tokens, dtype=np.int32)
        logprobs = rng.standard_normal(num_tokens).astype(np.float32)
        self._arrays = [memoryview(array).cast("B") for array in (prompt, completion, logprobs)]
        specs = [("prompt_ids", "int32", [200]), ("completion_ids", "int32", [num_tokens]), ("logprobs", "float32", [num_tokens])]  # fmt: skip
        self._sample_header = {
            "protocol": PROTOCOL_VERSION,
            "kind": SampleResult.kind,
            "run_id": RUN_ID,
            "re": 0,
            "arrays": specs,
        }
        self._score_header = {
            "protocol": PROTOCOL_VERSION,
            "kind": ScoreResult.kind,
            "run_id": RUN_ID,
            "re": 0,
            "arrays": [],
        }
        tests = tuple(TestResult(verdict=Verdict.ACCEPTED, score=1.0, cpu_s=0.01, wall_s=0.01) for _ in range(3))
        good = JudgeResult(verdict=Verdict.ACCEPTED, reward=1.0, parts={"correctness": 1.0}, tests_passed=3, tests_total=3, tests=tests)  # fmt: skip
        self._results = [good.model_dump(), good.model_copy(update={"reward": 0.0}).model_dump()]
        self._text = "x" * (4 * num_tokens)  # about four characters a token
        self.poller = zmq.Poller()
        self.rollouts = [self._join(address, "rollout", f"rollout-{i}") for i in range(num_nodes)]
        self.rewards = [self._join(address, "reward", f"reward-{i}") for i in range(num_nodes)]
        self.learner = self._join(address, "learner", "learner")
        self._peers = {peer.socket: peer for peer in (*self.rollouts, *self.rewards, self.learner)}
        self._beat_at = 0.0
        self.learner.say(BatchRequest(step=1))

    def _join(self, address: str, role: str, node_id: str) -> Peer:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, f"{node_id}#bench".encode())
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        self.poller.register(socket, zmq.POLLIN)
        peer = Peer(socket, node_id)
        capacity = {"rollout": self.capacity, "reward": self.capacity * GROUP_SIZE, "learner": 0}[role]
        holds = VersionTag(version=0) if role == "rollout" else None
        peer.say(Hello(role=role, node_id=node_id, host="bench", pid=os.getpid(), capacity=capacity, holds=holds))
        return peer

    def run(self, *, until: float = float("inf"), samples: float = float("inf")) -> None:
        """Serve everybody till the time ``until`` (of ``time.perf_counter``) or till ``samples`` are trained."""
        while time.perf_counter() < until and self.num_trained < samples:
            if time.perf_counter() > self._beat_at:
                self._beat()
            for socket, _ in self.poller.poll(200):
                peer = self._peers[socket]
                for _ in range(64):
                    try:
                        frames = socket.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    self._on_message(peer, frames)

    def _beat(self) -> None:
        self._beat_at = time.perf_counter() + BEAT_S
        for peer in self.rollouts:
            holds = VersionTag(version=self.version)
            peer.say(
                Heartbeat(capacity=self.capacity, holds=holds, counters={"generated_tokens": float(peer.generated)})
            )
        for peer in (*self.rewards, self.learner):
            peer.say(Heartbeat(capacity=self.capacity * GROUP_SIZE if peer is not self.learner else 0))

    def _on_message(self, peer: Peer, frames: list[bytes]) -> None:
        header = peek(frames[0])
        kind, body = header["kind"], header["body"]
        if kind == "generate_lease":
            for index in body["sample_indices"]:
                self._send_sample(peer, body, index)
        elif kind == "score_lease":
            key = (body["group_id"], body["sample_index"])
            self.lease_s.append(time.perf_counter() - self._result_at.pop(key))
            self._send_score(peer, body)
        elif kind == "batch":
            self.num_trained += len(decode(frames).message.samples)  # type: ignore[attr-defined]
            self.version = body["step"]
            saved = self.version // CHECKPOINT_STEPS * CHECKPOINT_STEPS
            peer.say(
                StepCommitted(step=self.version, metrics={"train/loss": 0.5}, checkpoint_step=saved, replay_from=saved)
            )
            self._beat()
            peer.say(BatchRequest(step=self.version + 1))
        elif kind == "weight_update_needed":  # the update itself is measured elsewhere
            self._beat()
            peer.say(BatchRequest(step=self.version + 1))
        elif header["re"] in peer.sent_at:
            self.ack_s.append(time.perf_counter() - peer.sent_at.pop(header["re"]))

    def _send_sample(self, peer: Peer, lease: dict[str, Any], index: int) -> None:
        peer.seq += 1
        peer.generated += self.num_tokens
        body = {
            "lease_id": lease["lease_id"],
            "group_id": lease["group_id"],
            "sample_index": index,
            "text": f"{index}{self._text}",
            "finish_reason": "stop",
            "segments": [Segment(version=self.version, num_tokens=self.num_tokens).model_dump()],
        }
        peer.sent_at[peer.seq] = self._result_at[lease["group_id"], index] = time.perf_counter()
        self.num_sent += 1
        peer.send(seal(msgpack.packb(self._sample_header | {"seq": peer.seq, "body": body}), self._arrays))

    def _send_score(self, peer: Peer, lease: dict[str, Any]) -> None:
        peer.seq += 1
        body = {
            "lease_id": lease["lease_id"],
            "group_id": lease["group_id"],
            "sample_index": lease["sample_index"],
            "result": self._results[lease["sample_index"] % 2],
        }
        peer.sent_at[peer.seq] = time.perf_counter()
        peer.send(seal(msgpack.packb(self._score_header | {"seq": peer.seq, "body": body}), []))

    def stop(self) -> None:
        """End the run."""
        self.learner.say(StopRequest(reason="measured"))
        time.sleep(0.3)
        self.context.destroy(linger=0)


@dataclass(frozen=True)
class Round:
    """One measurement. Rates in samples a second; times in seconds."""

    rate: float
    cpu_s: float  # of the coordinator, for one sample
    ack: tuple[float, float]  # p50, p99
    lease: tuple[float, float]


def coordinator(folder: Path, port: int, tree: Path = HERE) -> subprocess.Popen[bytes]:
    """A coordinator process of the code in ``tree``, on the first core."""
    suite = {"kind": "asserts", "entry_point": "f", "code": "assert f(3) == 3"}
    tasks = [{"task_id": f"t{i}", "prompt": "Write f(x). " * 20, "tests": suite} for i in range(500)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    config = {
        "run": {"id": RUN_ID, "dir": str(folder), "model": str(folder), "address": f"tcp://127.0.0.1:{port}", "log_level": "warning"},
        "coordinator": {
            "tasks": str(folder / "tasks.jsonl"), "group_size": GROUP_SIZE, "groups_per_step": GROUPS_PER_STEP,
            "max_steps": 1_000_000, "max_staleness": 7, "bypass_window": GROUPS_PER_STEP, "node_timeout_s": 60, "leave_timeout_s": 0.5,
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    argv = [sys.executable, "-m", "services.coordinator", "--config", str(folder / "config.json")]
    log = (folder / "log").open("wb")
    process = subprocess.Popen(argv, stdout=log, stderr=log, cwd=tree)
    os.sched_setaffinity(process.pid, {0})
    return process


def cpu_s(pid: int) -> float:
    """User and system time so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def rss_mib(pid: int) -> float:
    """Resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(
    port: int, *, num_tokens: int, capacity: int, seconds: float, num_nodes: int = NUM_NODES, tree: Path = HERE
) -> Round:
    """One coordinator, warmed up for two seconds, then measured."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name:
        process = coordinator(Path(name), port, tree)
        try:
            load = Load(f"tcp://127.0.0.1:{port}", num_tokens=num_tokens, capacity=capacity, num_nodes=num_nodes)
            load.run(samples=1)
            load.run(until=time.perf_counter() + 2)
            load.ack_s.clear()
            load.lease_s.clear()
            before, used, started = load.num_sent, cpu_s(process.pid), time.perf_counter()
            load.run(until=started + seconds)
            count, passed = load.num_sent - before, time.perf_counter() - started
            result = Round(
                count / passed,
                (cpu_s(process.pid) - used) / count,
                (quantile(load.ack_s, 0.5), quantile(load.ack_s, 0.99)),
                (quantile(load.lease_s, 0.5), quantile(load.lease_s, 0.99)),
            )
            load.stop()
            process.wait(20)
            return result
        finally:
            process.kill()
            process.wait()


def table(rows: list[tuple[str, list[Round]]]) -> Iterator[str]:
    """Markdown: medians, with the range of the rates."""
    yield "| samples of | in flight | samples/s, median [range] | CPU for one | acknowledged after p50, p99 | score lease after p50, p99 |"
    yield "| --- | --- | --- | ---: | --- | --- |"
    for name, rounds in rows:
        rates = [r.rate for r in rounds]
        ack, lease = ([median(getattr(r, what)[i] for r in rounds) * 1e3 for i in (0, 1)] for what in ("ack", "lease"))
        yield (
            f"| {name} | {median(rates):,.0f} [{min(rates):,.0f}-{max(rates):,.0f}] | {median(r.cpu_s for r in rounds) * 1e6:.0f} us "
            f"| {ack[0]:.1f}, {ack[1]:.1f} ms | {lease[0]:.1f}, {lease[1]:.1f} ms |"
        )


KINDS = [("1,000 tokens", 1000, 16, 16), ("1,000 tokens", 1000, 8, 1), ("1,000 tokens", 1000, 1, 1), ("10,000 tokens", 10_000, 8, 8)]  # fmt: skip
Rounds = dict[tuple[str, Path], list[Round]]  # by kind and tree


def in_turn(trees: list[Path], kinds: list[tuple[str, int, int, int]], args: argparse.Namespace) -> Rounds:
    """``args.rounds`` rounds of each kind (name, tokens, nodes of each role, groups of each) with the code of each tree."""
    rounds: Rounds = {}
    for index in range(args.rounds):
        for name, num_tokens, nodes, capacity in kinds:
            for tree in trees[:: -1 if index % 2 else 1]:
                how: dict[str, Any] = {"num_tokens": num_tokens, "capacity": capacity, "num_nodes": nodes, "tree": tree}
                result = measure(args.port + index % 50, seconds=args.seconds, **how)
                rounds.setdefault((f"{name} | {nodes * capacity} groups", tree), []).append(result)
    return rounds


def ratios(rounds: Rounds, trees: list[Path]) -> Iterator[str]:
    """What the first tree reaches of the second: medians over medians."""
    for name in dict.fromkeys(name for name, _ in rounds):
        first, second = [rounds[name, tree] for tree in trees]
        rate = median(r.rate for r in first) / median(r.rate for r in second)
        cpu = median(r.cpu_s for r in first) / median(r.cpu_s for r in second)
        yield f"{name}: {rate:.2f} times the samples a second, {cpu:.2f} times the processor time for one"


def endure(port: int, num_samples: int) -> None:
    """Memory and disk over a long run."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as name:
        process = coordinator(Path(name), port)
        try:
            load = Load(f"tcp://127.0.0.1:{port}", num_tokens=1000, capacity=8)
            print(
                "| samples trained | seconds | memory, MiB | journal, MiB |\n| ---: | ---: | ---: | ---: |", flush=True
            )
            started = time.perf_counter()
            for tenth in range(1, 11):
                load.run(samples=num_samples * tenth / 10)
                load.ack_s.clear()
                load.lease_s.clear()
                size = sum(path.stat().st_size for path in Path(name).glob(f"{RUN_ID}/journal.sqlite*")) / 2**20
                seconds = time.perf_counter() - started
                print(f"| {load.num_trained:,} | {seconds:.0f} | {rss_mib(process.pid):.0f} | {size:.0f} |", flush=True)
            load.stop()
            process.wait(60)
        finally:
            process.kill()
            process.wait()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=0, help="instead: one long run with memory and disk")
    parser.add_argument("--against", type=Path, help="another working tree, measured in turn")
    parser.add_argument(
        "--only-first", action="store_true", help="1,000 tokens with 256 groups in flight, and nothing else"
    )
    parser.add_argument("--port", type=int, default=5790)
    args = parser.parse_args()
    if (
        args.against
        and f"PROTOCOL_VERSION = {PROTOCOL_VERSION}\n" not in (args.against / "protocol/messages/base.py").read_text()
    ):
        parser.error(
            f"--against: {args.against} speaks another protocol version; run its own bench.coordinator, in turn with this one."
        )
    os.sched_setaffinity(0, {1 % (os.cpu_count() or 1)})
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; coordinator on core 0, load on core 1\n"
    )
    if args.samples:
        return endure(args.port, args.samples)
    trees = [HERE, args.against.resolve()] if args.against else [HERE]
    rounds = in_turn(trees, KINDS[: 1 if args.only_first else None], args)
    for tree in trees:
        print(f"{tree.name}:\n\n" if args.against else "", end="")
        print("\n".join(table([(name, done) for (name, its_tree), done in rounds.items() if its_tree == tree])), "\n")
    if args.against:
        print("\n".join(ratios(rounds, trees)))


if __name__ == "__main__":
    main()
