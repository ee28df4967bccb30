"""What became of every sample, group and step of a run: from its journal, from what passed the proxy, and from the trained weight.

None of it is taken from the coordinator's counters alone: the ledger is recomputed from the rows, what was acknowledged is known from
the wire, and the fake policy's weight is a checksum of all that it was trained on, so it tells whether the learner trained each batch
of the journal exactly once and in order. ``judge`` compares all of it; a case passes only if nothing differs.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from common.errors import ProtocolError
from protocol.codec import Received, decode
from protocol.messages import (
    Ack,
    Batch,
    Heartbeat,
    LeaseCancelled,
    LeaseFailed,
    SampleResult,
    ScoreResult,
    StepCommitted,
)
from services.coordinator.sample_arrays import array_parts
from tests.faults.processes import events_in
from tests.faults.proxy import Seen

Key = tuple[int, int]  # group, sample index
GROUP_STRIDE = 4096  # as in services/coordinator/journal.py: sample_id = group_id * stride + sample_index


@dataclass
class Verdict:
    """``lost``: samples, verdicts and steps that were acknowledged and are in no account. ``duplicated``: groups and samples that were
    trained twice. ``problems``: everything else that contradicts itself, and a sentence for each loss and duplicate."""

    lost: int = 0
    duplicated: int = 0
    problems: list[str] = field(default_factory=list)

    def lose(self, what: str) -> None:
        """One more loss."""
        self.lost += 1
        self.problems.append(f"lost: {what}")

    def repeat(self, what: str) -> None:
        """One more duplicate."""
        self.duplicated += 1
        self.problems.append(f"twice: {what}")


@dataclass
class Sample:
    """A row of the journal. ``digest`` is of all that the node sent (see ``_digest``)."""

    digest: bytes
    oldest_version: int
    num_tokens: int
    has_result: bool
    given_up: bool


@dataclass
class Books:
    """A journal, read while nobody writes it or beside who does."""

    group_status: dict[int, str]
    group_step: dict[int, int | None]
    overtaken: dict[int, int]
    samples: dict[Key, Sample]
    steps: dict[int, list[int]]  # step -> groups
    committed: list[int]
    ledger: dict[str, int]
    forgotten_before: int  # samples of groups before it have left the journal (``coordinator.keep_trained_steps``)

    def is_forgotten(self, group_id: int) -> bool:
        """Whether its samples were let go: those of ended groups go with the first steps that no replay needs."""
        return group_id < self.forgotten_before and self.group_status.get(group_id) in ("trained", "failed", "filtered")

    @property
    def is_complete(self) -> bool:
        """Whether all that was ever trained is there."""
        return not any(self.is_forgotten(group_id) for group_ids in self.steps.values() for group_id in group_ids)


def read_books(path: Path) -> Books:
    """The journal at ``path``, opened read-only."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=60)) as db:
        groups = db.execute("SELECT group_id, status, step, overtaken FROM groups").fetchall()
        rows = db.execute(
            "SELECT samples.*, result IS NOT NULL, COALESCE(lost, 0) FROM samples LEFT JOIN results USING (sample_id) "
            "LEFT JOIN unjudged USING (sample_id)"
        ).fetchall()
        samples = {divmod(row[0], GROUP_STRIDE): _sample(*row[1:]) for row in rows}
        steps = {step: json.loads(ids) for step, ids in db.execute("SELECT step, group_ids FROM steps ORDER BY step")}
        committed = [
            step for (step,) in db.execute("SELECT step FROM steps WHERE committed_at IS NOT NULL ORDER BY step")
        ]
        meta = dict(db.execute("SELECT key, value FROM meta"))
    return Books(
        {row[0]: row[1] for row in groups},
        {row[0]: row[2] for row in groups},
        {row[0]: row[3] for row in groups},
        samples,
        steps,
        committed,
        json.loads(meta.get("ledger", "{}")),
        int(meta.get("forgotten_before", "0")),
    )


def _sample(
    text: str, _finish: str, segments: str, num_prompt: int, arrays: bytes, _crc: int, has_result: int, given_up: int
) -> Sample:
    spans = json.loads(segments)
    num_tokens = sum(count for _, count in spans)
    oldest = min(version for version, _ in spans)
    return Sample(_digest(text, num_prompt, arrays), oldest, num_tokens, bool(has_result), bool(given_up))


def _digest(text: str, num_prompt_tokens: int, arrays: bytes) -> bytes:
    """Of all that a node sent of a sample; ``arrays`` as the journal has them."""
    content = text.encode("utf-8", "surrogatepass") + b"\0" + num_prompt_tokens.to_bytes(8, "little") + arrays
    return blake2b(content, digest_size=16).digest()


def judge(
    books: Books, seen: Sequence[Seen], *, max_staleness: int, bypass_window: int, finished: bool = False
) -> Verdict:
    """Compare all accounts. ``finished``: the run did all its steps, so no group may be left over."""
    verdict = Verdict()
    told = list(answered(seen))
    _check_acknowledged(verdict, books, told)
    _check_batches(verdict, books, told)
    _check_steps(verdict, books)
    _check_ledger(verdict, books)
    _check_generated(verdict, books, seen)
    _check_age_and_order(verdict, books, max_staleness=max_staleness, bypass_window=bypass_window)
    live = [group_id for group_id, status in books.group_status.items() if status in ("open", "ready", "batched")]
    if finished and live:
        verdict.problems.append(f"the run has done all its steps, and groups {live} were admitted for nothing")
    return verdict


# ---- the wire ----


def answered(seen: Iterable[Seen]) -> Iterator[tuple[Received, Received]]:
    """Requests that the coordinator answered, with the answer; each pair as often as it was answered."""
    requests: dict[tuple[bytes, int], Received] = {}
    for item in seen:
        if not item.frames:
            continue
        try:
            if item.direction == "up" and item.seq:
                requests[item.identity, item.seq] = decode(item.frames)
            elif item.re and (request := requests.get((item.identity, item.re))) is not None:
                yield request, decode(item.frames)
        except ProtocolError:
            continue


def _check_acknowledged(verdict: Verdict, books: Books, told: Sequence[tuple[Received, Received]]) -> None:
    """All that the coordinator acknowledged is in the journal, as it was sent."""
    accepted: dict[Key, set[bytes]] = {}
    for request, answer in told:
        match request.message, answer.message:
            case SampleResult() as sample, Ack(accepted=True):
                num_prompt = int(request.arrays["prompt_ids"].size)
                digest = _digest(sample.text, num_prompt, b"".join(array_parts(request.arrays)))
                accepted.setdefault((sample.group_id, sample.sample_index), set()).add(digest)
            case ScoreResult(result=result) as score, Ack() if result.reward is not None:
                row = books.samples.get((score.group_id, score.sample_index))
                out = books.group_status.get(score.group_id) in ("failed", "filtered")
                if not (
                    out or books.is_forgotten(score.group_id) or (row is not None and (row.has_result or row.given_up))
                ):
                    verdict.lose(f"the acknowledged verdict on sample {score.group_id}/{score.sample_index}")
            case StepCommitted(step=step), Ack() if step not in books.committed:
                verdict.lose(f"the acknowledged commit of step {step}")
    for key, digests in accepted.items():
        if key not in books.samples:
            if not books.is_forgotten(key[0]):
                verdict.lose(f"the acknowledged sample {key[0]}/{key[1]}")
        elif books.samples[key].digest not in digests:
            verdict.problems.append(f"sample {key[0]}/{key[1]} is in the journal with other content than it was sent")


def _check_batches(verdict: Verdict, books: Books, told: Sequence[tuple[Received, Received]]) -> None:
    """A step is given the same batch each time, and it is the journal's."""
    first: dict[int, bytes] = {}
    for _, answer in told:
        if not isinstance(batch := answer.message, Batch):
            continue
        content = blake2b(json.dumps([sample.model_dump() for sample in batch.samples]).encode(), digest_size=16)
        for array in answer.arrays.values():
            content.update(array.tobytes())
        if first.setdefault(batch.step, content.digest()) != content.digest():
            verdict.problems.append(f"step {batch.step} was given two different batches")
        groups = {sample.group_id for sample in batch.samples}
        if groups != set(books.steps.get(batch.step, [])):
            verdict.problems.append(f"step {batch.step} was given groups {sorted(groups)}, not those of the journal")


# ---- the journal ----


def _check_steps(verdict: Verdict, books: Books) -> None:
    """Steps follow each other, and each group is in one of them at most."""
    if books.committed != list(range(1, len(books.committed) + 1)):
        verdict.problems.append(f"committed steps are {books.committed}")
    uses = Counter(group_id for group_ids in books.steps.values() for group_id in group_ids)
    for group_id, count in uses.items():
        for _ in range(count - 1):
            verdict.repeat(f"group {group_id} is in {count} steps or {count} times in one")
    for step in books.committed:
        for group_id in books.steps[step]:
            if books.group_status.get(group_id) != "trained" or books.group_step.get(group_id) != step:
                verdict.lose(f"group {group_id} of step {step}, which is {books.group_status.get(group_id)}")
    for group_id, status in books.group_status.items():
        if status == "trained" and books.group_step[group_id] not in books.committed:
            verdict.problems.append(f"group {group_id} is trained, but no committed step has it")


def _check_ledger(verdict: Verdict, books: Books) -> None:
    """The coordinator's counters are those that follow from the rows."""
    if not books.ledger:
        return
    tokens: Counter[str] = Counter()
    groups = Counter(books.group_status.values())
    for (group_id, _), sample in books.samples.items():
        status = books.group_status[group_id]
        if status in ("open", "ready", "batched"):
            tokens["buffered"] += sample.num_tokens
        elif status == "trained" and sample.given_up:
            tokens["failed"] += sample.num_tokens
        else:
            tokens[status] += sample.num_tokens
    ledger = books.ledger
    for what in ("filtered", "failed", "trained"):
        if books.ledger[what] < tokens[what]:
            verdict.problems.append(f"the ledger has {what} = {books.ledger[what]}, but {tokens[what]} are in rows")
    counted = {
        "trained": tokens["trained"] if books.is_complete else ledger["trained"],
        "groups_trained": groups["trained"],
        "groups_filtered": groups["filtered"],
        "groups_failed": groups["failed"],
        "groups_admitted": groups.total(),
    }
    for name, value in counted.items():
        if ledger[name] != value:
            verdict.problems.append(f"the ledger has {name} = {ledger[name]}, the journal's rows come to {value}")
    accounts = sum(ledger[name] for name in ("trained", "filtered", "failed", "duplicate", "lost"))
    if ledger["received"] != accounts + tokens["buffered"]:
        text = f"{ledger['received']} tokens were received, and {accounts} + {tokens['buffered']} are accounted for"
        verdict.problems.append(f"the ledger does not close: {text}")


def _check_generated(verdict: Verdict, books: Books, seen: Sequence[Seen]) -> None:
    """The ledger has not received more tokens than the engines can have made: each engine's last count, or what it has sent."""
    counted: Counter[bytes] = Counter()
    sent: dict[tuple[bytes, int], int] = {}
    for item in seen:
        if item.direction != "up" or item.kind not in ("heartbeat", "sample_result", "lease_failed", "lease_cancelled"):
            continue
        with contextlib.suppress(ProtocolError):
            received = decode(item.frames)
            match received.message:
                case Heartbeat(counters=counters):
                    counted[item.identity] = max(counted[item.identity], int(counters.get("generated_tokens", 0)))
                case SampleResult():
                    sent[item.identity, item.seq] = int(received.arrays["completion_ids"].size)
                case LeaseFailed(num_tokens=num_tokens) | LeaseCancelled(num_tokens=num_tokens):
                    sent[item.identity, item.seq] = num_tokens
    delivered: Counter[bytes] = Counter()
    for (identity, _), num_tokens in sent.items():
        delivered[identity] += num_tokens
    most = sum(max(counted[identity], delivered[identity]) for identity in {*counted, *delivered})
    if not seen or not books.ledger:
        return
    if (received := books.ledger["received"]) > most:
        text = f"received {received} tokens, and the engines can have made {most} at most"
        verdict.problems.append(f"the ledger counts tokens more than once: it has {text}")


def _check_age_and_order(verdict: Verdict, books: Books, *, max_staleness: int, bypass_window: int) -> None:
    """Staleness and overtaking, from the rows: within the caps, and never negative."""
    trained: list[int] = []
    for step in books.committed:
        trained += books.steps[step]
        for group_id in books.steps[step]:
            for (owner, index), sample in books.samples.items():
                age = step - 1 - sample.oldest_version
                if owner == group_id and not sample.given_up and not 0 <= age <= max_staleness:
                    verdict.problems.append(f"sample {owner}/{index} was trained {age} versions late")
    for position, group_id in enumerate(trained):
        passed = sum(other > group_id for other in trained[:position])
        same_step = books.group_step.get(group_id)
        passed -= sum(other > group_id for other in trained[:position] if books.group_step.get(other) == same_step)
        if passed > bypass_window:
            verdict.problems.append(f"group {group_id} was overtaken by {passed} younger ones")


def weight_from_journal(path: Path, *, run_id: str, steps: int) -> float:
    """What a fake policy weighs that is trained on the journal's batches, each once and in order. The coordinator must have ended."""
    from services.coordinator.core.batches import (
        make_batch,  # here: the learner's modules need torch, and --list does not
    )
    from services.coordinator.journal import Journal
    from services.learner.batch_samples import to_train_samples
    from services.learner.config import ObjectiveConfig
    from services.learner.fake_policy import FakePolicy

    journal = Journal(path, run_id=run_id)
    try:
        policy = FakePolicy(step_s=0)
        for step in range(1, steps + 1):
            batch, arrays = make_batch(step, journal.batch(step), replay=True)
            if samples := to_train_samples(batch, arrays, ObjectiveConfig()):
                policy.train_step(samples, total_steps_done=step - 1)
        return policy.weight
    finally:
        journal.close()


def log_events(log: Path) -> list[dict[str, Any]]:
    """The log events of a role, of all its lives."""
    return events_in(log.read_text(errors="replace")) if log.exists() else []


def closes(status: dict[str, Any]) -> str:
    """What is open in the ledger of a status or summary, tokens in flight included; '' if it closes."""
    ledger = status["ledger"]
    parts = ("trained", "buffered", "in_flight", "filtered", "failed", "duplicate", "lost")
    ended = sum(ledger[f"groups_{what}"] for what in ("trained", "filtered", "failed"))
    if ledger["generated"] != sum(ledger[part] for part in parts):
        return f"tokens: {ledger}"
    if ledger["groups_admitted"] != ended + sum(status["groups"].values()):
        return f"groups: {ledger}, {status['groups']}"
    return ""
