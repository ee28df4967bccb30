"""Which part of a completion is the answer."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.extraction import extract_code

CODE = "def solve(x):\n    return x + 1\n"


def value_of(completion: str, argument: int = 1) -> object:
    """What the extracted ``solve`` returns. Only for completions written in this file."""
    code = extract_code(completion, "solve")
    assert code is not None, "no code was found"
    scope: dict[str, object] = {"__name__": "solution"}
    exec(compile(code, "<extracted>", "exec"), scope)
    return scope["solve"](argument)  # type: ignore[operator]


@pytest.mark.parametrize(
    "label", ["", "py", "python", "python3", "Python", 'python title="x"', "{.python}", " python "]
)
def test_labels_of_python_blocks_are_known(label: str) -> None:
    assert value_of(f"Here:\n```{label}\n{CODE}```\nDone.") == 2


@pytest.mark.parametrize(
    "completion",
    [
        f"~~~python\n{CODE}~~~",
        f"````python\n{CODE}````",
        "1. Do it:\n\n   ```python\n   def solve(x):\n       return x + 1\n   ```\n",
        "- ```python\n  def solve(x):\n      return x + 1\n  ```\n",
        f"Text\r\n```python\r\n{CODE.replace(chr(10), chr(13) + chr(10))}```\r\n",
        f"```python\n{CODE}",
        CODE,
        f"Sure, here is the code:\n\n{CODE}\nThis adds one to the number.",
        '```python\ndef solve(x):\n    """Example:\n    ```\n    solve(1)\n    ```\n    """\n    return x + 1\n```\n',
        f"````markdown\n```python\nwrong\n```\n````\n```python\n{CODE}```",
        f"```python\n{CODE}```\nInstall:\n```bash\npip install foo\n```",
    ],
    ids=["tilde", "four", "list", "dash", "crlf", "unclosed", "plain", "prose", "docstring", "nested", "bash"],
)
def test_dialects_of_fences_give_the_code(completion: str) -> None:
    assert value_of(completion) == 2


def test_the_last_block_that_defines_the_entry_point_wins_over_an_example_run() -> None:
    draft = "```python\ndef solve(x):\n    return 0\n```\nwrong, fix:\n"
    assert value_of(f"{draft}```python\n{CODE}```\nexample:\n```python\nprint(solve(3))\n```") == 2


def test_a_draft_before_the_closing_think_tag_is_not_the_answer() -> None:
    draft = "```python\ndef solve(x):\n    return 0\n```\nhmm.</think>\n"
    assert value_of(f"{draft}```python\n{CODE}```") == 2
    assert value_of(f"<think>{draft}{CODE}") == 2


def test_thinking_that_never_closes_holds_no_code() -> None:
    assert extract_code(f"<think>\n```python\n{CODE}```", "solve") is None


def test_a_think_tag_in_a_literal_is_code() -> None:
    assert value_of('```python\ndef solve(x):\n    return "</think>"\n```') == "</think>"


def test_a_string_with_a_bar_or_a_fence_in_an_expression_survives() -> None:
    assert value_of("```python\ndef solve(x):\n    return x | 2\n```") == 3


@pytest.mark.parametrize("completion", ["", "I can't do that.", "```bash\nls\n```", "```\n```", "\n\n"])
def test_no_code_is_none(completion: str) -> None:
    assert extract_code(completion, "solve") is None


def test_a_long_module_without_a_fence_keeps_its_code_and_loses_the_prose() -> None:
    body = "".join(f"def helper_{i}(x):\n    return x + {i}\n\n" for i in range(1000))
    completion = f"{body}{CODE}\n# notes\nThis solution adds one to its argument.\n"
    started = time.process_time()
    assert value_of(completion) == 2
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    "unit",
    [
        "```\n",
        "~~~\n'''\n",
        '```python\n"""\n',
        "</think>",
        "def solve",
        "- ",
        "```a\n```\n",
        " \t>",
        "a, b ",
        "```" * 50,
    ],
)
def test_a_huge_text_takes_linear_time(unit: str) -> None:
    text = unit * ((1 << 20) // len(unit))
    started = time.process_time()
    extract_code(text, "solve")
    assert time.process_time() - started < 5.0


@given(st.text(alphabet=st.sampled_from(list("`~ \n\t'\"<>/thinkdefsolv(x):=\r\ud800\0#-1.")), max_size=400))
def test_any_text_gives_code_or_none(text: str) -> None:
    assert isinstance(extract_code(text, "solve"), str | None)
