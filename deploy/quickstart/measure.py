"""Measures how often a model folder solves the quickstart's tasks, sampling with plain transformers on the CPU.

    python deploy/quickstart/measure.py --model deploy/quickstart/model

The programs run in a child process with limits on CPU time and memory. That is enough for this toy model, whose
corpus we wrote; anything else belongs in Forebay's sandbox.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from make_model import prompt_ids
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
MAX_NEW_TOKENS = 72
RUNNER = """
import contextlib, io, json, resource, signal, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 29, 1 << 29))
def stop(*_): raise TimeoutError
signal.signal(signal.SIGALRM, stop)
verdicts = []
for program in json.load(sys.stdin):
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(program, {})
        verdicts.append(True)
    except BaseException:
        verdicts.append(False)
    signal.setitimer(signal.ITIMER_REAL, 0)
print(json.dumps(verdicts))
"""


def read_tasks(path: Path) -> list[dict[str, Any]]:
    """The tasks as plain dicts, in file order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def extract(completion: str) -> str:
    """The program inside the first Markdown fence; all of the text when there is none."""
    _, fence, rest = completion.partition("```python\n")
    return rest.partition("```")[0] if fence else completion


def judge(completions: list[str], tasks: list[dict[str, Any]]) -> list[bool]:
    """Whether each completion passes the asserts of its task."""
    programs = [f"{extract(text)}\n{task['tests']['code']}" for text, task in zip(completions, tasks, strict=True)]
    command = [sys.executable, "-I", "-c", RUNNER]
    child = subprocess.run(command, input=json.dumps(programs), capture_output=True, text=True, timeout=300, check=True)
    return list(json.loads(child.stdout))


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompts: list[list[int]], *, temperature: float) -> list[list[int]]:
    """One completion (ids, with the end token where it came) per prompt; temperature 0 is greedy."""
    width = max(map(len, prompts))
    ids = torch.tensor([[tokenizer.pad_token_id] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    how: dict[str, Any] = {"do_sample": False}
    if temperature:
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, **how)[:, width:].tolist()
    eos = tokenizer.eos_token_id
    return [row[: row.index(eos) + 1] if eos in row else row for row in out]


def solve_counts(
    model: Any, tokenizer: Any, tasks: list[dict[str, Any]], k: int, temperature: float
) -> tuple[list[int], list[int]]:
    """(solved attempts of ``k`` per task, the lengths of all completions in tokens)."""
    counts, lengths = [0] * len(tasks), []
    for _ in range(k):
        for start in range(0, len(tasks), 128):
            chunk = tasks[start : start + 128]
            prompts = [prompt_ids(tokenizer, task["prompt"]) for task in chunk]
            rows = sample(model, tokenizer, prompts, temperature=temperature)
            lengths += map(len, rows)
            texts = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
            for i, passed in enumerate(judge(texts, chunk)):
                counts[start + i] += passed
    return counts, lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "model")
    parser.add_argument("--attempts", type=int, default=8, help="attempts a task at temperature 1")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    for split in ("train", "heldout"):
        tasks = read_tasks(HERE / f"tasks_{split}.jsonl")
        widths = [len(prompt_ids(tokenizer, task["prompt"])) for task in tasks]
        for temperature, k in ((1.0, args.attempts), (0.0, 1)):
            counts, lengths = solve_counts(model, tokenizer, tasks, k, temperature)
            mixed, mean = sum(0 < n < k for n in counts), sum(lengths) / len(lengths)
            print(
                f"{split:8s} temperature {temperature:.0f}: solved {sum(counts) / k / len(tasks):.3f}, "
                f"tasks solved sometimes {mixed}/{len(tasks)}, tokens: prompt {min(widths)}-{max(widths)}, "
                f"completion {min(lengths)}-{max(lengths)} (mean {mean:.1f})"
            )


if __name__ == "__main__":
    main()
