"""Writes the quickstart's task files, tasks_train.jsonl and tasks_heldout.jsonl. Deterministic by ``--seed``.

The two files share families but no (family, constants) pair, so a held-out task is not a renamed training task.
Every reference passes its asserts and every known bug fails them; generation stops with an assertion otherwise.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from families import FAMILIES, LETTERS, Family, Spec, choose

SEED = 20240
NUM_TRAIN = 320
NUM_HELDOUT = 96
NUM_ASSERTS = 8
LIMITS = {"cpu_s": 2.0, "wall_s": 8.0, "memory_mib": 512, "output_kib": 64}


def split_constants(family: Family, seed: int) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
    """The constants of ``family`` as (train, held-out) pairs; a quarter is held out."""
    pairs = [(a, b) for a in family.a for b in (family.b or (None,)) if a != b]
    random.Random(f"{seed}/{family.key}").shuffle(pairs)
    num_heldout = max(1, len(pairs) // 4)
    return pairs[num_heldout:], pairs[:num_heldout]


def sample_specs(num_tasks: int, seed: int, *, heldout: bool) -> list[Spec]:
    """``num_tasks`` different tasks, the families in turn, then shuffled."""
    rng = random.Random(f"{seed}/{'heldout' if heldout else 'train'}")
    splits = [set(split_constants(family, seed)[heldout]) for family in FAMILIES]
    specs: dict[str, Spec] = {}
    while len(specs) < num_tasks:
        index = len(specs) % len(FAMILIES)
        spec = choose(FAMILIES[index], rng)
        if (spec.a, spec.b) in splits[index] and spec.prompt not in specs:
            specs[spec.prompt] = spec
    shuffled = list(specs.values())
    rng.shuffle(shuffled)
    return shuffled


def _inputs(spec: Spec, rng: random.Random) -> list[tuple[Any, ...]]:
    """Arguments for the asserts: the edges of the constants first (they tell > from >=), then random ones."""
    edge = spec.a if isinstance(spec.a, int) else 0
    match spec.family.args:
        case "x":
            fixed = [(edge,), (edge - 1,), (edge + 1,), (-3,), (edge * 4,), (0,)]
            return [*fixed, *((rng.randint(10, 40),) for _ in range(NUM_ASSERTS - len(fixed)))]
        case "x, y":
            pairs = [(rng.randint(-20, 20), rng.randint(-20, 20)) for _ in range(NUM_ASSERTS - 3)]
            return [(2, 9), (9, 2), (-3, 4), *pairs]
        case "xs":
            lists = [[rng.randint(-9, 15) for _ in range(rng.randint(8, 10))] for _ in range(NUM_ASSERTS - 1)]
            return [([edge - 1, edge, edge + 1, 12, -4, edge, 7, 1],), *((values,) for values in lists)]
        case _:
            chars = [c for c in (spec.a, spec.b) if isinstance(c, str)] or list(LETTERS)
            first, last, mixed = chars[0], chars[-1], [*chars, *LETTERS]
            fixed = [f"{first}bc{last}{first}zxwq", f"k{first}cdefghj", f"pqw{last}xyzv{first}"]
            words = ["".join(rng.choices(mixed, k=rng.randint(8, 11))) for _ in range(NUM_ASSERTS - len(fixed))]
            return [(word,) for word in fixed + words]


def _call(program: str, name: str, args: tuple[Any, ...]) -> Any:
    scope: dict[str, Any] = {}
    exec(program, scope)  # our own program, from families.py
    return scope[name](*args)


def passes(program: str, code: str) -> bool:
    """Whether ``program`` passes the asserts ``code``. For our own programs only: runs in this process."""
    try:
        exec(f"{program}\n{code}", {})
    except Exception:  # a bug may raise anything; a task's verdict is only pass or fail
        return False
    return True


def make_task(spec: Spec, task_id: str, seed: int) -> dict[str, Any]:
    """``spec`` as a line of protocol/tasks.py."""
    rng = random.Random(f"{seed}/{task_id}")
    reference = spec.program(spec.family.right)
    results = [(args, _call(reference, spec.name, args)) for args in _inputs(spec, rng)]
    calls = [f"assert {spec.name}({', '.join(map(repr, args))}) == {result!r}" for args, result in results]
    code = "\n".join(calls)
    assert passes(reference, code), spec
    bugs = [spec.program(bug) for bug in spec.family.wrong]
    if isinstance(spec.a, int):
        bugs.append(spec.program(spec.family.right, a=spec.a + 1))
    for bug in bugs:
        assert not passes(bug, code), f"a bug passes {task_id}:\n{bug}{code}"
    tests = {"kind": "asserts", "entry_point": spec.name, "code": code, "limits": LIMITS}
    return {"task_id": task_id, "prompt": spec.prompt, "tests": tests, "reference": reference}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the two files")
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for split, num_tasks in (("train", NUM_TRAIN), ("heldout", NUM_HELDOUT)):
        specs = sample_specs(num_tasks, args.seed, heldout=split == "heldout")
        tasks = [make_task(spec, f"quickstart/{split}/{i:03d}", args.seed) for i, spec in enumerate(specs)]
        lines = "".join(json.dumps(task, ensure_ascii=True) + "\n" for task in tasks)
        (args.out / f"tasks_{split}.jsonl").write_text(lines, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
