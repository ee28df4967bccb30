"""Languages besides Python: which programs compile and run them, where these are installed on this node.

A toolchain is found on PATH. Compilers run in the same kind of sandbox as what they make, with limits of their own.
"""

from __future__ import annotations

import mmap
import os
import re
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass

from protocol.suites import Limits
from services.reward.sandbox.streams import parts

_COMPILE_LIMITS = Limits(cpu_s=20, wall_s=60, memory_mib=2048, processes=16)
_SYSTEM = ("/usr/bin", "/usr/include", "/usr/libexec", "/usr/share/nodejs", "/usr/local/include")


@dataclass(frozen=True)
class Toolchain:
    """How to compile (or not) and to run one language. Paths are the same inside the sandbox."""

    program: str  # the compiler, or the interpreter
    source_name: str
    compile: tuple[str, ...] = ()  # arguments; makes the file ``main``
    run: tuple[str, ...] = ()  # arguments of an interpreter; empty: run what was compiled
    reserves_memory: bool = False  # much more address space than it uses, so that limiting that would break it
    compile_limits: Limits = _COMPILE_LIMITS

    def compile_frame(self, code: str) -> bytes:
        """For the guest that compiles."""
        return _frame((self.program, *self.compile), {self.source_name: code})

    def run_frame(self, code: str, limits: Limits) -> bytes:
        """For the guest that runs."""
        if not self.run:
            return _frame(("",), {})
        memory = [
            part.replace("{memory_mib}", str(limits.memory_mib)).replace("{stack_kib}", str(limits.stack_mib * 1000))
            for part in self.run
        ]
        return _frame((self.program, *memory), {self.source_name: code})


def _frame(arguments: tuple[str, ...], files: dict[str, str]) -> bytes:
    items = [str(len(arguments)).encode(), *(argument.encode() for argument in arguments)]
    for name, content in files.items():
        items += [name.encode(), content.encode("utf-8", "surrogatepass")]
    return parts(*items)


class Toolchains:
    """Those of this node, looked up once."""

    def __init__(self) -> None:
        self._found: dict[str, Toolchain] = {}
        self._interpreters: dict[str, list[mmap.mmap]] = {}  # that stay in memory, by language
        if compiler := _program("g++", "clang++"):
            flags = ("-O2", "-std=c++17", "-pipe", "-static", "-w", "-fmax-errors=5", "-o", "main", "main.cpp")
            self._found["cpp"] = Toolchain(compiler, "main.cpp", compile=flags)
        if node := _program("node", "nodejs"):
            arguments = ("--max-old-space-size={memory_mib}", "--stack-size={stack_kib}", "main.js")
            self._found["javascript"] = Toolchain(node, "main.js", run=arguments, reserves_memory=True)

    def get(self, language: str) -> Toolchain | None:
        """``None`` where it is not installed."""
        tool = self._found.get(language)
        if tool is not None and tool.run and language not in self._interpreters:
            self._interpreters[language] = kept_in_memory(tool.program)
        return tool

    @staticmethod
    def wanted(language: str) -> str:
        """What would have to be installed."""
        return {"cpp": "g++ or clang++", "javascript": "node"}.get(language, language)

    def paths(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Folders that the toolchains need, and the interpreters that a running program may execute."""
        programs = tuple(tool.program for tool in self._found.values() if tool.run)
        folders = [path for path in _SYSTEM if os.path.isdir(path)]
        for tool in self._found.values():
            folder = os.path.dirname(tool.program)
            if not any(folder == path or folder.startswith(path + "/") for path in folders):
                folders.append(folder)
        return tuple(folders), programs


def kept_in_memory(program: str) -> list[mmap.mmap]:
    """A program and its shared libraries, read and mapped: they stay in the page cache, on this process's account, for as long as this is held.

    The kernel charges a page of a file to the control group that touches it first. Where that is a worker's, a program that is at its memory
    limit is not ended: the kernel takes the interpreter's own pages (90 MB for node), which are read again at once, without end and at the
    expense of the program's CPU time. So the verdict would depend on what was in the page cache.
    """
    maps = []
    for path in (program, *_libraries(program)):
        with suppress(OSError, ValueError), open(path, "rb") as file:  # it runs without, too
            maps.append(mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ))
    return maps


def _libraries(program: str) -> list[str]:
    try:
        told = subprocess.run(("ldd", program), capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [os.path.realpath(path) for path in re.findall(r"(/\S+) \(0x", told)]


def _program(*names: str) -> str | None:
    for name in names:
        if found := shutil.which(name):
            return os.path.realpath(found)
    return None
