"""Compiled programs: what came out of a sandbox, kept for the next run of the same source."""

from __future__ import annotations

import fcntl
import os
import stat
from collections import OrderedDict
from hashlib import blake2b

from services.reward.languages import Toolchain

_MAX_BYTES = 64 << 20  # of one
_KEPT_BYTES = 256 << 20  # of all


class Artifacts:
    """Descriptors of programs by compiler and source, the last used ones."""

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # descriptor and size

    def get(self, toolchain: Toolchain, code: str) -> int | None:
        """The descriptor of what ``code`` was compiled to, if that is still here. It stays this object's."""
        key = _key(toolchain, code)
        if key not in self._kept:
            return None
        self._kept.move_to_end(key)
        return self._kept[key][0]

    def keep(self, toolchain: Toolchain, code: str, artifact: int) -> int | None:
        """Keep a copy of the file that a compiler made of ``code``, and close the file. The copy's descriptor; ``None`` if the file is too
        large, or no regular one."""
        copy = _sealed_copy(artifact)
        if copy is None:
            return None
        self._kept[_key(toolchain, code)] = copy
        while sum(size for _, size in self._kept.values()) > _KEPT_BYTES and len(self._kept) > 1:
            os.close(self._kept.popitem(last=False)[1][0])
        return copy[0]

    def close(self) -> None:
        """Forget all. Safe to call twice."""
        while self._kept:
            os.close(self._kept.popitem()[1][0])


def _key(toolchain: Toolchain, code: str) -> bytes:
    return blake2b(f"{toolchain.compile}\0{code}".encode("utf-8", "surrogatepass")).digest()


def _sealed_copy(artifact: int) -> tuple[int, int] | None:
    """Descriptor and size (bytes) of a copy that no one can change of a file that came out of a sandbox; closes the file."""
    try:
        status = os.fstat(artifact)
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
            return None
        copy = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with open(artifact, "rb", closefd=False) as source, open(copy, "wb", closefd=False) as target:
            target.write(source.read(_MAX_BYTES))
        fcntl.fcntl(
            copy, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
        )
        return copy, status.st_size
    finally:
        os.close(artifact)
