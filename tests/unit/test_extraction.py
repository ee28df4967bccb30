"""Which part of a completion is the answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.suites import Language
from services.reward.extraction import extract_code

LANGUAGES: tuple[Language, ...] = ("python", "cpp", "javascript")
CODE = "def solve(x):\n    return x + 1\n"


def value_of(completion: str, argument: int = 1) -> object:
    """What the extracted ``solve`` returns. Only for completions written in this file."""
    code = extract_code(completion, "solve")
    assert code is not None, "no code was found"
    scope: dict[str, object] = {"__name__": "solution"}
    exec(compile(code, "<extracted>", "exec"), scope)
    return scope["solve"](argument)  # type: ignore[operator]


@pytest.mark.parametrize(
    "label",
    [
        "",
        "py",
        "python",
        "python3",
        "Python",
        'python title="x"',
        "{.python}",
        "{.python .numberLines}",
        "{python}",
        " python ",
        "python:main.py",
        "python3.11",
        "py {1,3}",
        "plaintext",
        "solution",
    ],
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


@pytest.mark.timeout(60)  # what grows faster than its input takes hours
def test_a_long_module_without_a_fence_keeps_its_code_and_loses_the_prose() -> None:
    body = "".join(f"def helper_{i}(x):\n    return x + {i}\n\n" for i in range(1000))
    completion = f"{body}{CODE}\n# notes\nThis solution adds one to its argument.\n"
    assert value_of(completion) == 2


@pytest.mark.parametrize(
    "completion",
    [
        "> Sure:\n>\n> ```python\n> def solve(x):\n>     return x + 1\n> ```\n",
        ">> ```python\n>> def solve(x):\n>>     return x + 1\n>> ```\n",
        f"````\n```python\n{CODE}```\n````",
        f"```markdown\n# Answer\n```python\n{CODE}```\n```",
        f"````md\n# Answer\n```python\n{CODE}```\nDone\n````",
        f"```python\n```python\n{CODE}```\n```",
        f"```python\ndef solve(x):\n    return 0\n\nNo, this one:\n```python\n{CODE}```\n",
        "```python\ndef solve(x):\n    return x + 1```",
        "```python\n    def solve(x):\n        return x + 1\n```",
        '1. Code:\n   ```python\n   def solve(x):\n       """\nText\n"""\n       return x + 1\n   ```\n',
        f"1. ```python\n{CODE}```\n",
        "```pycon\n>>> def solve(x):\n...     return x + 1\n...\n>>> solve(1)\n2\n```",
        "```\n>>> def solve(x):\n...     return x + 1\n... \n>>> solve(3)\n4\n```",
        f"```python\n{CODE}```\nOutput:\n```\n2\n```",
        f"{CODE}```bash\npython x.py\n```",
        f'```python\n{CODE}\n# an odd number of marks: """\n```\nTest:\n```python\n"""doc"""\nprint(solve(1))\n```',
        'def solve(x):\n    """Example:\n    ```\n    solve(1)\n    ```\n    """\n    return x + 1\n',
        '```python\ndef solve(x):\n    """\n    ```python\n    solve(1)\n    ```\n    and\n    ```\n    solve(2)\n    ```\n    """\n    return x + 1\n```\n',
        f"<answer>\n{CODE}</answer>",
        f"```python\n{CODE}```\n**Notes**\n\n- it adds\n",
        f"{CODE}\n- it adds one\n- it is fast\n\n**Time**: constant\n",
        "```python\nsolve = lambda x: x + 1\n```\n```python\nprint(solve(2))\n```",
        f"```java\nint solve(int x) {{ return 0; }}\n```\n```python\n{CODE}```\n```ts\nfunction solve() {{}}\n```",
        f"```python\n{CODE}```\n```python\nsolve = Solution().solve\nprint(solve(1))\n```",
        f"```python\n{CODE}```\nExample:\n```python\n# def solve(x): as above\nprint(solve(3))\n```",
    ],
    ids=str,
)
def test_more_dialects_give_the_code(completion: str) -> None:
    assert value_of(completion) == 2


def test_one_block_is_the_answer_never_several_joined() -> None:
    completion = "```python\ndef f(x): return x+1\n```\nwrong, fix:\n```python\ndef f(x): return x+2\n```\n```bash\npip install foo\n```"
    assert extract_code(completion, "f") == "def f(x): return x+2\n"


def test_a_method_or_a_class_is_a_definition_too() -> None:
    method = "class Solution:\n    def twoSum(self, nums):\n        return nums\n"
    draft = "```python\ndef twoSum(nums):\n    pass\n```\n"
    example = "```python\nprint(Solution().twoSum([1]))\n```\n"
    for name in ("twoSum", "Solution.twoSum", "Solution", "Solution.twoSum "):
        assert extract_code(f"{draft}```python\n{method}```\n{example}", name) == method
    assert extract_code(f"```python\n{method}```\n{draft}", "Solution.twoSum") == method
    assert (
        extract_code("```python\nasync def solve(x): ...\n```\n```python\nsolve(1)\n```", "solve")
        == "async def solve(x): ...\n"
    )


def test_without_a_definition_the_last_labelled_block_is_taken() -> None:
    assert extract_code("```python\nx = 1\n```\n```\nout\n```", "solve") == "x = 1\n"
    assert extract_code("```\nx = 1\n```\n```bash\nls\n```", "solve") == "x = 1\n"
    assert extract_code("```text\nx = 1\n```", "solve") is None


@pytest.mark.parametrize("tag", ["think", "thinking", "thought", "reasoning"])
def test_every_tag_of_thinking_is_known(tag: str) -> None:
    draft = "```python\ndef solve(x):\n    return 0\n"
    assert value_of(f"<{tag}>{draft}\n</{tag}>\n```python\n{CODE}```") == 2
    assert value_of(f"{draft}```\nNo</{tag}>Here:\n```python\n{CODE}```") == 2
    assert value_of(f"<{tag}>{draft}</{tag}>{CODE}") == 2
    assert value_of(f"<{tag}>{draft}It's \"done\"</{tag}>Here's\n```python\n{CODE}```") == 2
    assert extract_code(f"\n<{tag}>{draft}", "solve") is None
    assert extract_code(f"<{tag}>{draft}    return '</{tag}>'\n", "solve") is None


@pytest.mark.parametrize(
    "line",
    [
        're.sub(r"<think>.*?</think>", "", s)',
        'f"{x}</think>{x}"',
        "x\n    # up to </think>",
        '"</think>"',
        "'a</think>\\n'",
    ],
)
def test_a_think_tag_in_code_is_code(line: str) -> None:
    code = f"def solve(x):\n    y = {line}\n    return x + 1\n"
    assert extract_code(f"Thought.</think>\n```python\n{code}```", "solve") == code
    assert extract_code(f"```python\n{code}```", "solve") == code


READS = "n = int(input())\nprint(n * 2)\n"


@pytest.mark.parametrize(
    "completion",
    [
        f"```python\n{READS}```",
        f"```python\nprint(0)\n```\nNo:\n```python\n{READS}```",
        f"```python\n{READS}```\nRun it:\n```bash\necho 2 | python x.py\n```\n```\n4\n```",
        f"```python\n{READS}```\nExample:\n```python\nprint(solve(3))  # 6\n```",
        f"```python\n{READS}```\nTest:\n```python\nimport io, sys\nsys.stdin = io.StringIO('2')\nmain()\n```",
        f"```python\ndef helper():\n    pass\n```\n```\n{READS}```",
        f"Here you are:\n\n{READS}\nIt doubles the number.",
        READS,
        f"<think>print(input())</think>{READS}",
    ],
    ids=str,
)
def test_the_last_program_that_reads_input_is_the_answer(completion: str) -> None:
    assert extract_code(completion) == READS


def test_a_program_need_not_read_anything() -> None:
    assert extract_code("```python\nx = 1\n```\n```python\nprint(5)\n```\n```\n5\n```") == "print(5)\n"
    main = "def run():\n    pass\n\nif __name__ == '__main__':\n    run()\n"
    assert extract_code(f"```python\n{main}```\n```python\nrun()\n```") == main
    assert extract_code("I would print the result with a program.") is None


CPP = "#include <iostream>\nint main() {\n    int n;\n    std::cin >> n;\n    std::cout << n;\n}\n"
JS = "const lines = require('fs').readFileSync(0, 'utf8').split('\\n');\nconsole.log(lines.length);\n"


@pytest.mark.parametrize("label", ["cpp", "c++", "C++", "cc", "cxx", "c++17", "cpp20", "{.cpp}", "", "c"])
def test_labels_of_cpp_are_known(label: str) -> None:
    completion = f"```{label}\n{CPP}```\nBuild:\n```bash\ng++ a.cpp\n```\n```python\nprint(1)\n```\n```\n3\n```"
    assert extract_code(completion, "", "cpp") == CPP


@pytest.mark.parametrize("label", ["js", "javascript", "JavaScript", "node", "nodejs", "mjs", "jsx", ""])
def test_labels_of_javascript_are_known_and_typescript_is_another_language(label: str) -> None:
    completion = (
        f"```{label}\n{JS}```\n```ts\nconsole.log(readline() as string)\n```\n```js\nconsole.log(solve(3))\n```"
    )
    assert extract_code(completion, "", "javascript") == JS
    assert extract_code(f"```ts\n{JS}```\n", "", "javascript") is None


@pytest.mark.parametrize(("language", "code"), [("cpp", CPP), ("javascript", JS)])
def test_other_languages_without_a_fence_lose_their_prose_too(language: Language, code: str) -> None:
    for completion in (code, f"Here is the program:\n\n{code}\nIt reads one number.\n", f"<think>x</think>\n{code}"):
        assert extract_code(completion, "", language) == code
    assert extract_code("I can't.", "", language) is None
    assert extract_code("```python\nprint(input())\n```", "", language) is None


def shapes() -> list[str]:
    return ["```\n", "~~~\n'''\n", '```python\n"""\n', "</think>", '"</think>"', "def solve", "x def solve\n", "- ", " - ```\n", "```a\n```\n", " \t>",
             "a, b ", "```" * 50, "\n", "a\n", " x\n", "`", "`a", "``` ", "```a ", "~", "~~~a ", "````\n```\n```\n````\n", "````\n" + "```\n" * 60 + "````\n",
             "> ```\n", " ", "\nsolve=", '"""\'\'\'', "```\n'''\n```\n```\n\"\"\"\n```\n", ">>> a\n", "stdin = ", "Prose it is.\n", "(", "\r", "# </think>\n"]  # fmt: skip


@pytest.mark.parametrize("unit", shapes(), ids=repr)
@pytest.mark.timeout(60)  # what grows faster than its input takes hours
def test_five_megabytes_of_anything_are_read_once_or_a_few_times(unit: str) -> None:
    text = unit * (5_000_000 // len(unit))
    extract_code(f"```python\n{text}", "solve")
    extract_code(f"{text}\ndef solve(x):\n    print(input())\n")


@pytest.mark.timeout(60)  # what grows faster than its input takes hours
def test_a_long_run_of_marks_is_looked_at_once() -> None:
    extract_code("`" * 5_000_000 + "a", "solve")
    extract_code("x" + "~" * 5_000_000 + "a", "solve")


@given(st.text(alphabet=st.sampled_from(list("`~ \n\t'\"<>/thinkdefsolv(x):=\r\ud800\0#-1.")), max_size=400))
def test_any_text_gives_code_or_none(text: str) -> None:
    for language in LANGUAGES:
        for entry_point in ("solve", "Solution.solve", ""):
            code = extract_code(text, entry_point, language)
            assert code is None or (code.strip() and code.endswith("\n"))
