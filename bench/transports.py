"""The same work through what a user would pick instead: a Ray actor, a Ray queue, Redis streams with JSON and with msgpack.

    python3 -m venv /tmp/others && /tmp/others/bin/pip install ray redis numpy msgpack
    apt-get install redis-server
    python -m bench.transports [--seconds 8] [--rounds 3] [--ray-python /tmp/others/bin/python]

A sample goes from a rollout to a judge, its verdict comes back, and full batches of 512 samples with their arrays go to a learner. The middle
part (coordinator, actor, redis-server) has the first core, everybody else the second, in all of them. What each does beyond that:

    forebay      leases with deadlines, staleness, a ledger, each sample durable (fsync) before it is acknowledged
    ray actor    a buffer in an actor's memory: nothing is durable, nothing is redelivered
    ray queue    ray.util.queue for samples, verdicts and batches, the same
    redis *      consumer groups, acknowledged by each reader; appendfsync always (durable as ours), or everysec (the default)

Samples are of 1,000 tokens with log-probs and 4,000 characters of text. Prints a markdown table of medians with ranges.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

BATCH = 512
WINDOW = 256  # samples between rollout and verdict
NUM_TOKENS = 1000


def make_sample() -> dict[str, object]:
    """What a rollout hands in."""
    rng = np.random.default_rng(0)
    return {
        "prompt_ids": rng.integers(0, 32000, 200, dtype=np.int32),
        "completion_ids": rng.integers(0, 32000, NUM_TOKENS, dtype=np.int32),
        "logprobs": rng.standard_normal(NUM_TOKENS).astype(np.float32),
        "text": "x" * 4 * NUM_TOKENS,
        "segments": [[1, NUM_TOKENS]],
    }


def pin_rest() -> None:
    """This process and what it starts from now on: the second core."""
    os.sched_setaffinity(0, {1 % (os.cpu_count() or 1)})


# ---- ours ----


def forebay(seconds: float) -> float:
    """Samples a second through the coordinator."""
    from bench.coordinator import measure

    return measure(5781, num_tokens=NUM_TOKENS, capacity=8, seconds=seconds).rate


# ---- redis ----


def redis_streams(seconds: float, *, packed: bool, fsync: str) -> float:
    """Two streams: samples (read by judges and by the learner), verdicts (read by the learner)."""
    import msgpack
    import redis

    def dump(value: dict[str, object]) -> bytes:
        plain = {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in value.items()} if packed else {
            k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in value.items()}  # fmt: skip
        return msgpack.packb(plain) if packed else json.dumps(plain).encode()

    load = (lambda data: msgpack.unpackb(data)) if packed else json.loads
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        path = f"{folder}/redis.sock"
        argv = [
            "redis-server",
            "--port",
            "0",
            "--unixsocket",
            path,
            "--dir",
            folder,
            "--save",
            "",
            "--appendonly",
            "yes",
        ]
        server = subprocess.Popen([*argv, "--appendfsync", fsync], stdout=subprocess.DEVNULL)
        os.sched_setaffinity(server.pid, {0})
        try:
            client = redis.Redis(unix_socket_path=path)
            while not Path(path).exists():
                time.sleep(0.05)
            for stream, group in (("samples", "judges"), ("samples", "learner"), ("verdicts", "learner")):
                client.xgroup_create(stream, group, mkstream=True)
            sample, verdict = make_sample(), {"verdict": "accepted", "reward": 1.0, "tests": [[1, 0.01]] * 3}
            num_sent = num_judged = num_trained = 0
            waiting: dict[bytes, object] = {}
            start = time.perf_counter()
            while time.perf_counter() - start < seconds:
                pipe = client.pipeline(transaction=False)
                for _ in range(max(0, min(64, WINDOW - (num_sent - num_judged)))):
                    pipe.xadd("samples", {"d": dump(sample | {"group": num_sent // 8, "index": num_sent % 8})})
                    num_sent += 1
                pipe.execute()
                pipe = client.pipeline(transaction=False)
                for _, messages in client.xreadgroup("judges", "judge", {"samples": ">"}, count=64):
                    for key, fields in messages:
                        load(fields[b"d"])
                        pipe.xadd("verdicts", {"d": dump(verdict | {"sample": key.decode()})})
                        pipe.xack("samples", "judges", key)
                        num_judged += 1
                pipe.execute()
                for _, messages in client.xreadgroup("learner", "l", {"samples": ">"}, count=64):
                    waiting |= {key: load(fields[b"d"]) for key, fields in messages}
                done = client.xreadgroup("learner", "l", {"verdicts": ">"}, count=BATCH)
                for _, messages in done:
                    pipe = client.pipeline(transaction=False)
                    for key, fields in messages:
                        sample_key = load(fields[b"d"])["sample"].encode()
                        waiting.pop(sample_key, None)
                        pipe.xack("samples", "learner", sample_key).xack("verdicts", "learner", key)
                        pipe.xdel("samples", sample_key).xdel("verdicts", key)
                        num_trained += 1
                    pipe.execute()
            return num_trained / (time.perf_counter() - start)
        finally:
            server.terminate()
            server.wait()


# ---- ray ----


def ray_actor(seconds: float) -> float:
    """One actor holds the buffer; rollout, judge and learner call it."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)

    @ray.remote(num_cpus=0)
    class Buffer:
        def __init__(self) -> None:
            os.sched_setaffinity(0, {0})
            self.samples: dict[int, object] = {}
            self.unjudged: list[int] = []
            self.ready: list[int] = []

        def put(self, key: int, sample: object) -> None:
            self.samples[key] = sample
            self.unjudged.append(key)

        def take_unjudged(self, count: int) -> list[tuple[int, str]]:
            keys, self.unjudged = self.unjudged[:count], self.unjudged[count:]
            return [(key, self.samples[key]["text"]) for key in keys]

        def judged(self, key: int, verdict: object) -> None:
            self.ready.append(key)

        def batch(self) -> list[object] | None:
            if len(self.ready) < BATCH:
                return None
            keys, self.ready = self.ready[:BATCH], self.ready[BATCH:]
            return [self.samples.pop(key) for key in keys]

    try:
        buffer = Buffer.remote()
        sample, verdict = make_sample(), {"verdict": "accepted", "reward": 1.0, "tests": [[1, 0.01]] * 3}
        num_sent = num_judged = num_trained = 0
        ray.get(buffer.batch.remote())
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            calls = []
            for _ in range(max(0, min(64, WINDOW - (num_sent - num_judged)))):
                calls.append(buffer.put.remote(num_sent, sample | {"group": num_sent // 8}))
                num_sent += 1
            for key, _ in ray.get(buffer.take_unjudged.remote(64)):
                calls.append(buffer.judged.remote(key, verdict))
                num_judged += 1
            ray.get(calls)
            num_trained += len(ray.get(buffer.batch.remote()) or [])
        return num_trained / (time.perf_counter() - start)
    finally:
        ray.shutdown()


def ray_queue(seconds: float) -> float:
    """Three queues of ray.util.queue: samples, verdicts, batches."""
    import ray
    from ray.util.queue import Queue

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        samples, verdicts = Queue(actor_options={"num_cpus": 0}), Queue(actor_options={"num_cpus": 0})
        sample, verdict = make_sample(), {"verdict": "accepted", "reward": 1.0, "tests": [[1, 0.01]] * 3}
        num_trained = 0
        samples.put(sample)
        samples.get()
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            samples.put_nowait_batch(
                [copy.deepcopy(sample) for _ in range(64)]
            )  # or pickle would send their arrays once
            taken = samples.get_nowait_batch(64)
            verdicts.put_nowait_batch([(item, verdict) for item in taken])
            num_trained += len(verdicts.get_nowait_batch(64))
        return num_trained / (time.perf_counter() - start)
    finally:
        ray.shutdown()


SYSTEMS: dict[str, Callable[[float], float]] = {
    "forebay": forebay,
    "redis msgpack, fsync always": lambda s: redis_streams(s, packed=True, fsync="always"),
    "redis JSON, fsync always": lambda s: redis_streams(s, packed=False, fsync="always"),
    "redis msgpack, fsync everysec": lambda s: redis_streams(s, packed=True, fsync="everysec"),
    "ray actor": ray_actor,
    "ray queue": ray_queue,
}


def main() -> None:
    """Measure each in a process of its own, in turn, round after round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--ray-python", default=sys.executable, help="an interpreter that has ray, redis, numpy and msgpack"
    )
    parser.add_argument("--one", choices=SYSTEMS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        pin_rest()
        print(SYSTEMS[args.one](args.seconds))
        return
    rates: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    for _ in range(args.rounds):
        for name in SYSTEMS:
            python = sys.executable if name == "forebay" else args.ray_python
            argv = [python, "-m", "bench.transports", "--one", name, "--seconds", str(args.seconds)]
            done = subprocess.run(argv, capture_output=True, text=True, timeout=300)
            if done.returncode:
                sys.exit(f"{name} failed:\n{done.stderr[-2000:]}")
            rates[name].append(float(done.stdout.splitlines()[-1]))
    print("| | samples/s, median [range] | against forebay |\n| --- | --- | ---: |")
    for name, values in rates.items():
        share = median(values) / median(rates["forebay"])
        print(f"| {name} | {median(values):,.0f} [{min(values):,.0f}-{max(values):,.0f}] | {share:.2f} |")


if __name__ == "__main__":
    main()
