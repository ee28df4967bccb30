"""What of a Python program's readability can be counted. Runs in the sandbox's guest, before any code of the candidate.

Loaded by path, so standard library only. ``ast`` is imported inside, so that the worker stays small. ``services/reward/rewards.py`` turns
the metrics into a share. They are counts and maxima, never shares of the program, so that clean code or comments which are added
around a mess hide nothing of it. The few names that a task itself prescribes (``twoSum(s, t)``) are below what costs anything.
"""

from __future__ import annotations

import re
from typing import Any

_MAX_SOURCE_CHARS = 65_536  # about half a second's work; a longer program has no metrics
_LONG_LINE_CHARS = 100
_MIN_REPEATED_CHARS = 12  # shorter statements may repeat
_MIN_DOCUMENTED_STATEMENTS = 8  # a function this long is to say what it does
_VARIABLE = re.compile(r"_{0,2}[a-z][a-z0-9_]*|_+|_{0,2}[A-Z][A-Z0-9_]*|[A-Z][A-Za-z0-9]*|__[a-z0-9_]+__")
_FUNCTION = re.compile(r"_{0,2}[a-z][a-z0-9_]*|_|__[a-z0-9_]+__")
_CLASS = re.compile(r"_{0,2}[A-Z][A-Za-z0-9]*")


def measure(source: str) -> dict[str, float]:
    """Metrics of a program by name; empty if it doesn't parse or is too long. All are finite and at least 0.

    ========================  =======================================================================================
    ``longest_function``      statements of the longest function, or of the module outside of functions
    ``max_complexity``        cyclomatic complexity of the most complex function, or of the module
    ``max_nesting``           loops, conditions and the like around one statement (an ``elif`` is as deep as its ``if``)
    ``largest_expression``    operations, calls and names in the largest statement
    ``long_lines``            lines of more than 100 characters
    ``joined_statements``     statements that share a line with the one before
    ``poor_names``            names of one letter (not of loops, comprehensions, lambdas), or not in the usual case
    ``unused_names``          imports and variables that nothing reads
    ``bare_excepts``          handlers of everything, and handlers that do nothing
    ``repeated_statements``   statements that were there before, word for word
    ``undocumented``          functions of 8 statements or more without a docstring
    ``padding``               lines of comments and docstrings beyond one for each line of code
    ========================  =======================================================================================
    """
    import ast
    import warnings

    if len(source) > _MAX_SOURCE_CHARS:
        return {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of invalid escapes
            tree = ast.parse(source)
        return _Program(ast, tree, source).metrics()
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}


class _Program:
    """One walk over the tree, without recursion: a hostile one is deep."""

    def __init__(self, ast: Any, tree: Any, source: str) -> None:
        self.ast = ast
        self.lines = [line.encode("utf-8", "surrogatepass") for line in re.split(r"\r\n|\r|\n", source)]
        self.filled = [bool(line.strip()) for line in self.lines]
        self.tree = tree
        self.num_statements: dict[Any, int] = {tree: 0}  # by function (or the module)
        self.complexity: dict[Any, int] = {tree: 1}
        self.max_nesting = 0
        self.largest = 0
        self.poor: set[str] = set()
        self.stored: set[str] = set()  # names that something should read
        self.read: set[str] = set()
        self.excepts = 0
        self.start_lines: list[int] = []
        self.texts: dict[bytes, int] = {}
        self.docstring_lines = 0
        self.undocumented = 0

    def metrics(self) -> dict[str, float]:
        ast = self.ast
        stack: list[tuple[Any, Any, int]] = [(self.tree, self.tree, 0)]  # node, its function, depth
        while stack:
            node, function, depth = stack.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                function = node
                self.num_statements[node], self.complexity[node] = 0, 1
            self._note(node, function, depth)
            for child in ast.iter_child_nodes(node):
                stack.append((child, function, self._depth(node, child, depth)))
        for function, count in self.num_statements.items():
            documented = function is self.tree or ast.get_docstring(function, clean=False)
            self.undocumented += count >= _MIN_DOCUMENTED_STATEMENTS and not documented
        return {
            "longest_function": float(max(self.num_statements.values())),
            "max_complexity": float(max(self.complexity.values())),
            "max_nesting": float(self.max_nesting),
            "largest_expression": float(self.largest),
            "long_lines": float(
                sum(len(line.decode("utf-8", "surrogatepass")) > _LONG_LINE_CHARS for line in self.lines)
            ),
            "joined_statements": float(len(self.start_lines) - len(set(self.start_lines))),
            "poor_names": float(len(self.poor)),
            "unused_names": float(len({name for name in self.stored - self.read if not name.startswith("_")})),
            "bare_excepts": float(self.excepts),
            "repeated_statements": float(sum(count - 1 for count in self.texts.values())),
            "undocumented": float(self.undocumented),
            "padding": self._padding(),
        }

    def _depth(self, node: Any, child: Any, depth: int) -> int:
        """Depth of ``child``: one more than of the block it is in. Functions, classes and handlers add nothing of their own."""
        ast = self.ast
        flat = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        if isinstance(node, flat) or not isinstance(child, ast.stmt):
            return depth
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        return depth if is_elif else depth + 1

    def _note(self, node: Any, function: Any, depth: int) -> None:
        ast = self.ast
        self.complexity[function] += self._branches(node)
        if isinstance(node, ast.stmt):
            self._note_statement(node, function, depth)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            self.read.add(node.id)
        elif isinstance(node, ast.Attribute):  # a field of a class is assigned by its name, and read as an attribute
            self.read.add(node.attr)
        elif isinstance(node, ast.ExceptHandler):
            everything = node.type is None or getattr(node.type, "id", "") == "BaseException"
            nothing = all(isinstance(part, ast.Pass) for part in node.body)
            self.excepts += everything or nothing
        elif isinstance(node, ast.arguments) and not isinstance(function, ast.Module) and node is function.args:
            for argument in (*node.posonlyargs, *node.args, *node.kwonlyargs):
                self._judge(argument.arg, _VARIABLE, 2)

    def _branches(self, node: Any) -> int:
        ast = self.ast
        if isinstance(node, ast.BoolOp):
            return len(node.values) - 1
        if isinstance(node, ast.comprehension):
            return 1 + len(node.ifs)
        kinds = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.IfExp, ast.match_case)
        return int(isinstance(node, kinds))

    def _note_statement(self, node: Any, function: Any, depth: int) -> None:
        ast = self.ast
        if self._is_docstring(node):
            self.docstring_lines += sum(self.filled[node.lineno - 1 : node.end_lineno])
            return
        self.max_nesting = max(self.max_nesting, depth)
        self.start_lines.append(node.lineno)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._judge(node.name, _FUNCTION, 1)
        elif isinstance(node, ast.ClassDef):
            self._judge(node.name, _CLASS, 1)
        else:
            self.num_statements[function] += 1
            self._note_simple(node)

    def _note_simple(self, node: Any) -> None:
        ast = self.ast
        if isinstance(node, ast.Import | ast.ImportFrom) and getattr(node, "module", "") != "__future__":
            self.stored.update((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._note_target(target)
        # Blocks count by what is in their heads only: their statements come by themselves.
        heads = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr | ast.withitem)]
        free = (ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict)  # a table of data is no trouble
        counted = (ast.expr, ast.comprehension, ast.keyword)
        parts = (part for head in heads for part in ast.walk(head))
        size = sum(isinstance(part, counted) and not isinstance(part, free) for part in parts)
        self.largest = max(self.largest, size)
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr):
            text = self._text(node)
            if len(text) >= _MIN_REPEATED_CHARS:
                self.texts[text] = self.texts.get(text, 0) + 1

    def _note_target(self, target: Any) -> None:
        ast = self.ast
        if isinstance(target, ast.Name):
            self.stored.add(target.id)
        for part in ast.walk(target):  # of a tuple, some items may be there for the others' sake
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                self._judge(part.id, _VARIABLE, 2)

    def _judge(self, name: str, pattern: re.Pattern[str], min_length: int) -> None:
        if name != "_" and (len(name) < min_length or not pattern.fullmatch(name)):
            self.poor.add(name)

    def _is_docstring(self, node: Any) -> bool:
        """Any string that stands alone: a docstring, or a comment in its clothes."""
        ast = self.ast
        return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)

    def _text(self, node: Any) -> bytes:
        lines = self.lines[node.lineno - 1 : node.end_lineno]
        if len(lines) == 1:
            return lines[0][node.col_offset : node.end_col_offset]
        return b"\n".join(line.strip() for line in lines)

    def _padding(self) -> float:
        comments = sum(line.lstrip().startswith(b"#") for line in self.lines) + self.docstring_lines
        code = sum(self.filled) - comments
        return float(max(0, comments - max(0, code)))
