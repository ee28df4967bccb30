"""A test suite as the judge uses it: which names come from the candidate, and how each assert is evaluated and counted.

Two forms. *Inline*: every assert is a plain expression over calls of the candidate, literals and a few pure builtins; the judge
evaluates it itself, over values that the candidate's process sent. *Remote*: anything else (loops, helpers, try) runs in a second sandbox,
without candidate code, where the candidate's names are proxies. In both, no test and no expected value reaches the candidate's process.
Only the tests are parsed here, never a completion.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import math
import symtable
import sys
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any

from protocol.suites import TestSuite
from services.reward.sandbox import values

REPLY = "__forebay_reply__"
_TEXT = 200  # characters of an assert in a message

_PURE: dict[str, Any] = {
    function.__name__: function
    for function in (
        set,
        frozenset,
        sorted,
        list,
        tuple,
        dict,
        abs,
        round,
        len,
        sum,
        min,
        max,
        all,
        any,
        bool,
        float,
        type,
    )
}
_PURE |= {"isinstance": isinstance, "str": str, "int": int, "bytes": bytes}
_MATH = {
    name: getattr(math, name) for name in ("isclose", "sqrt", "pi", "e", "inf", "nan", "isnan", "fabs", "floor", "ceil")
}
_NODES = (
    ast.Expression, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict,
    ast.Subscript, ast.Slice, ast.Name, ast.Call, ast.keyword, ast.Attribute, ast.IfExp, ast.Load, ast.cmpop, ast.boolop,
    ast.unaryop, ast.operator,
)  # fmt: skip
# These could turn a candidate's value into a huge one, so they may stand only over literals.
_GROWING = (ast.Mult, ast.Pow, ast.LShift, ast.Mod)


@dataclass(frozen=True)
class CompiledSuite:
    """``inline`` holds the code of each assert, or is ``None`` and ``source`` holds the instrumented tests."""

    kind: str
    entry_point: str
    parameter: str  # under this name the asserts know the entry point (``candidate``, in ``check``)
    names: tuple[str, ...]
    num_asserts: int
    inline: tuple[CodeType, ...] | None
    source: str
    texts: tuple[str, ...] = ()  # of the inline asserts, for messages
    # Encoded, if all are known beforehand and none tells an answer; then ``inline`` asks for ``REPLY(index)``.
    calls: tuple[bytes, ...] | None = None


@lru_cache(maxsize=4096)
def compile_suite(kind: str, entry_point: str, code: str) -> CompiledSuite:
    """The suite, ready to run; the same object for the same text.

    Raises:
        ValueError: not Python, no assert, no call of the candidate, or no ``check`` function; says which.
    """
    entry_point = entry_point.strip()  # MBPP has one with a blank at its end
    if not entry_point.isidentifier():
        raise ValueError(f"The entry point {entry_point!r} is not a Python name.")
    try:
        tree = ast.parse(code)
        table = symtable.symtable(code, "<tests>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"The tests are not valid Python: {error}.") from None
    check = _find_check(tree) if kind == "check" else None
    num_asserts = sum(isinstance(node, ast.Assert) for node in ast.walk(tree))
    if not num_asserts:
        raise ValueError("The tests hold no assert, so nothing would be tested.")
    foreign = _foreign_names(table)
    modules = _forgotten_imports(tree, foreign) - {entry_point}
    names = (foreign - modules) | {entry_point}
    called = names | ({check.args.args[0].arg} if check else set())
    if not any(
        isinstance(node, ast.Name) and node.id in called and isinstance(node.ctx, ast.Load) for node in ast.walk(tree)
    ):
        raise ValueError(f"The tests never use {entry_point!r}.")
    asserts = _inline(tree, check, names, imports_math="math" in modules)
    inline = None if asserts is None else tuple(_code(expression) for expression in asserts)
    parameter = check.args.args[0].arg if check else entry_point
    texts = tuple(ast.unparse(expression)[:_TEXT] for expression in asserts or ())
    calls = None
    if asserts is not None and len(names) == 1:  # one function's inputs could be another's outputs
        known = _known_calls(asserts, _CallsFound(called, entry_point, parameter))
        calls, inline = known or (None, inline)
    source = "" if inline is not None else _instrumented(code, modules)
    return CompiledSuite(kind, entry_point, parameter, tuple(sorted(names)), num_asserts, inline, source, texts, calls)


def compiled(suite: TestSuite) -> CompiledSuite:
    """``compile_suite`` of a task's suite."""
    return compile_suite(suite.kind, suite.entry_point, suite.code)


def inline_scope(suite: CompiledSuite, proxies: dict[str, Any]) -> dict[str, Any]:
    """Globals for ``eval`` of the inline asserts: pure functions and the candidate's ``proxies`` by name."""
    pure = {"__builtins__": {}, "math": _Math, "isclose": math.isclose, **_PURE}
    return {**pure, **proxies, suite.parameter: proxies[suite.entry_point]}


class _Math:
    """The part of ``math`` that inline asserts may use."""


for _name, _value in _MATH.items():
    setattr(_Math, _name, _value if isinstance(_value, float) else staticmethod(_value))


def _find_check(tree: ast.Module) -> ast.FunctionDef:
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if not found or len(found[-1].args.args) != 1:
        raise ValueError("A suite of kind 'check' must define check(candidate).")
    return found[-1]


def _foreign_names(table: symtable.SymbolTable) -> set[str]:
    """Names that the tests use and neither define nor import: they are the candidate's."""
    own = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    own |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_namespace()}
    used: set[str] = set()
    queue = [table]
    while queue:
        scope = queue.pop()
        queue.extend(scope.get_children())
        top = scope is table
        used |= {s.get_name() for s in scope.get_symbols() if s.is_referenced() and (top or s.is_global())}
    return {name for name in used - own if not hasattr(builtins, name)}


def _forgotten_imports(tree: ast.Module, foreign: set[str]) -> set[str]:
    """Standard modules that the tests use as ``math.x`` without an import, counting on the solution's (MBPP does)."""
    bases = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    bare = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in bases}
    return (foreign & sys.stdlib_module_names) - bare


# --- inline ---


def _inline(
    tree: ast.Module, check: ast.FunctionDef | None, names: set[str], *, imports_math: bool
) -> tuple[ast.expr, ...] | None:
    asserts: list[ast.Assert] = []
    allowed = names | set(_PURE)
    for node in tree.body:
        if isinstance(node, ast.Import) and [(a.name, a.asname) for a in node.names] == [("math", None)]:
            imports_math = True
        elif isinstance(node, ast.ImportFrom) and node.module == "math" and [a.name for a in node.names] == ["isclose"]:
            if node.names[0].asname:
                return None
            allowed.add("isclose")
        elif node is check:
            assert check is not None
            allowed.add(check.args.args[0].arg)
            inner = [part for part in check.body if not _is_filler(part)]
            if check.decorator_list or not all(isinstance(part, ast.Assert) for part in inner):
                return None
            asserts += [part for part in inner if isinstance(part, ast.Assert)]
        elif isinstance(node, ast.Assert) and check is None:
            asserts.append(node)
        elif not _is_filler(node):
            return None
    if not all(_is_plain(node.test, allowed, names | (allowed - set(_PURE)), imports_math) for node in asserts):
        return None
    return tuple(node.test for node in asserts)


def _code(expression: ast.expr) -> CodeType:
    return compile(ast.fix_missing_locations(ast.Expression(expression)), "<test>", "eval")


def _is_filler(node: ast.stmt) -> bool:
    """Docstrings, ``pass`` and the METADATA literal of HumanEval."""
    if isinstance(node, ast.Assign):
        return [getattr(target, "id", "") for target in node.targets] == ["METADATA"]
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _is_plain(expression: ast.expr, allowed: set[str], foreign: set[str], imports_math: bool) -> bool:
    for node in ast.walk(expression):
        if not isinstance(node, _NODES):
            return False
        if isinstance(node, ast.Name) and node.id not in allowed and not (node.id == "math" and imports_math):
            return False
        if isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id == "math" and imports_math and node.attr in _MATH
        ):
            return False
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Name | ast.Attribute):
            return False
        if isinstance(node, ast.BinOp) and isinstance(node.op, _GROWING) and _names_in(node) & foreign:
            return False
    return True


def _names_in(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


# --- inline, with all calls known beforehand ---


class _CallsFound(ast.NodeTransformer):
    """Replaces each call of a candidate's function by ``_REPLY(index)``.

    Raises:
        _NotKnown: an argument needs the candidate, or whether the call is made at all does.
    """

    def __init__(self, called: set[str], entry_point: str, parameter: str) -> None:
        self.called = called
        self._names = {parameter: entry_point}
        self._scope = {"__builtins__": {}, "math": _Math, "isclose": math.isclose, **_PURE}
        self._sometimes = 0
        self.calls: list[bytes] = []
        self.arguments: list[Any] = []  # of all calls, as JSON trees

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if not isinstance(node.func, ast.Name) or node.func.id not in self.called:
            return self.generic_visit(node)
        if self._sometimes or any(keyword.arg is None for keyword in node.keywords):
            raise _NotKnown
        args = tuple(self._value(part) for part in node.args)
        kwargs = {str(keyword.arg): self._value(keyword.value) for keyword in node.keywords}
        name = self._names.get(node.func.id, node.func.id)
        encoder = values.Encoder()
        self.arguments += [encoder.encode(value) for value in (*args, *kwargs.values())]
        self.calls.append(values.dumps(["call", name, encoder.encode(args), encoder.encode(kwargs), []]))
        return ast.Call(ast.Name(REPLY, ast.Load()), [ast.Constant(len(self.calls) - 1)], [])

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.called:  # the function itself, as a value
            raise _NotKnown
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        return ast.BoolOp(node.op, [self.visit(node.values[0]), *self._visit_sometimes(node.values[1:])])

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        test = self.visit(node.test)
        return ast.IfExp(test, *self._visit_sometimes([node.body, node.orelse]))

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        left, first = self.visit(node.left), self.visit(node.comparators[0])
        return ast.Compare(left, node.ops, [first, *self._visit_sometimes(node.comparators[1:])])

    def _visit_sometimes(self, nodes: list[ast.expr]) -> list[ast.expr]:
        self._sometimes += 1
        visited = [self.visit(node) for node in nodes]
        self._sometimes -= 1
        return visited

    def _value(self, node: ast.expr) -> Any:
        if _names_in(node) & self.called:
            raise _NotKnown
        return eval(_code(node), dict(self._scope))  # the suite's expression, of allowed nodes and names only


def _literals(node: ast.AST, finder: _CallsFound) -> list[Any]:
    """The literals outside the candidate's arguments, as JSON trees; those within others too."""
    found: list[Any] = []
    if isinstance(node, ast.expr):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in finder.called:
            return found
        with contextlib.suppress(ValueError, TypeError, SyntaxError, values.ValueRefused):
            found.append(values.Encoder().encode(ast.literal_eval(node)))
    for child in ast.iter_child_nodes(node):
        found += _literals(child, finder)
    return found


class _NotKnown(Exception):
    pass


def _known_calls(
    asserts: tuple[ast.expr, ...], finder: _CallsFound
) -> tuple[tuple[bytes, ...], tuple[CodeType, ...]] | None:
    """The calls of all asserts, encoded, and the asserts over their replies; ``None`` where they depend on one another."""
    try:
        tests = tuple(_code(finder.visit(copy.deepcopy(expression))) for expression in asserts)
        expected = [tree for expression in asserts for tree in _literals(expression, finder)]
    except Exception:  # whatever it is, it comes again, with its own name, when the asserts are evaluated one by one
        return None
    if not finder.calls or values.shows_any(finder.arguments, expected):
        return None
    return tuple(finder.calls), tests


# --- remote ---


def _instrumented(code: str, modules: set[str]) -> str:
    imports = "".join(f"import {name}\n" for name in sorted(modules))
    return imports + ast.unparse(ast.fix_missing_locations(_Instrument().visit(ast.parse(code))))


class _Instrument(ast.NodeTransformer):
    """Each assert reports its end; one that fails does not stop the others. Inside ``try`` and ``with`` an assert still raises."""

    def __init__(self) -> None:
        self._guarded = 0

    def _visit_guarded(self, node: ast.AST) -> ast.AST:
        self._guarded += 1
        self.generic_visit(node)
        self._guarded -= 1
        return node

    visit_Try = visit_TryStar = visit_With = visit_AsyncWith = _visit_guarded

    def visit_Assert(self, node: ast.Assert) -> list[ast.stmt]:
        done = _call("__forebay_ok__", [])
        if self._guarded:
            return [node, done]
        text = ast.Constant(ast.unparse(node.test)[:_TEXT])
        failed = _call("__forebay_fail__", [ast.Name("__forebay_error__", ast.Load()), text])
        handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), "__forebay_error__", [failed])
        return [ast.Try([node], [handler], [done], [])]


def _call(name: str, args: list[ast.expr]) -> ast.stmt:
    return ast.Expr(ast.Call(ast.Name(name, ast.Load()), args, []))
