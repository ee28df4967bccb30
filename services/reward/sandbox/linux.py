"""The Linux calls that Python 3.11 does not have, through ctypes. Each function names its manual page.

Loaded by path in a worker; the fewest imports, because every page of a worker is copied for every guest. seccomp programs come from
libseccomp, on the judge's side (``filters.py``); here they are only installed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 1024, 2048, 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 4, 22, 38, 36


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _u32(value: int) -> bytes:
    return value.to_bytes(4, sys.byteorder)


def _u64(value: int) -> bytes:
    return value.to_bytes(8, sys.byteorder)


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """mount(2)."""
    args = [None if text is None else text.encode() for text in (source, target, kind)]
    _check(
        _libc.mount(*args, ctypes.c_ulong(flags), None if data is None else data.encode()),
        f"mount {source} on {target}",
    )


def umount(target: str) -> None:
    """umount2(2), lazily."""
    _check(_libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new_root: str, put_old: str) -> None:
    """pivot_root(2)."""
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"pivot_root is not known on {os.uname().machine}")
    _check(_libc.syscall(number, new_root.encode(), put_old.encode()), "pivot_root")


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument."""
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def drop_capabilities() -> None:
    """capset(2): none effective, permitted or inheritable."""
    header = _u32(0x20080522) + _u32(0)  # _LINUX_CAPABILITY_VERSION_3, this process
    _check(_libc.capset(header, bytes(24)), "capset")


# --- seccomp(2) ---


class SeccompProgram:
    """A BPF program of 8-byte instructions, laid out once so that installing it in a guest touches little memory."""

    def __init__(self, program: bytes) -> None:
        self._code = ctypes.create_string_buffer(program, len(program))
        self._fprog = _u64(len(program) // 8) + _u64(
            ctypes.addressof(self._code)
        )  # struct sock_fprog: u16, padding, pointer

    def install(self) -> None:
        """seccomp(2) through prctl; needs no_new_privs. Filters add up: all must allow."""
        _check(_libc.prctl(PR_SET_SECCOMP, 2, self._fprog, 0, 0), "seccomp")


# --- landlock(7): what a process may touch in the file system ---

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_FS_BY_ABI = {3: (1 << 15) - 1, 4: (1 << 15) - 1}  # all rights that the version knows; from 5 on also ioctl on devices
_NET, _SCOPES = 3, 3  # bind and connect TCP (ABI 4); abstract sockets and signals to outside (ABI 6)


def landlock_abi() -> int:
    """Version of Landlock here; 0 without."""
    return max(0, int(_libc.syscall(444, None, ctypes.c_size_t(0), 1)))


def landlock_ruleset(readable: list[str], executable: list[str], devices: list[str], box: str) -> int:
    """Descriptor of a ruleset: read ``readable``, also execute ``executable``, use ``devices``, do anything in ``box``, nothing else.

    Raises:
        OSError: no Landlock here, or older than ABI 3 (which can't refuse truncation).
    """
    abi = landlock_abi()
    if abi < 3:
        raise OSError(errno.ENOSYS, f"Landlock ABI {abi} is too old, 3 is needed")
    everything = _FS_BY_ABI.get(abi, (1 << 16) - 1)
    raw = _u64(everything) + (_u64(_NET) if abi >= 4 else b"") + (_u64(_SCOPES) if abi >= 6 else b"")
    ruleset = _check(_libc.syscall(444, raw, ctypes.c_size_t(len(raw)), 0), "landlock_create_ruleset")
    rules = [(path, _READ_FILE) for path in readable] + [(path, _READ_FILE | _EXECUTE) for path in executable]
    rules += [(path, _READ_FILE | _WRITE_FILE | _TRUNCATE) for path in devices]
    for path, access in rules:
        _landlock_allow(ruleset, path, access | (_READ_DIR if os.path.isdir(path) else 0))
    _landlock_allow(ruleset, box, everything & ~_EXECUTE)
    return ruleset


def _landlock_allow(ruleset: int, path: str, access: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _u64(access) + _u32(descriptor)
        _check(_libc.syscall(445, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
    finally:
        os.close(descriptor)


def landlock_add(ruleset: int, folder: int) -> None:
    """Allow to read what lies in an open folder."""
    rule = _u64(_READ_FILE | _READ_DIR) + _u32(folder)
    _check(_libc.syscall(445, ruleset, 1, rule, 0), "landlock_add_rule")


def install_landlock(ruleset: int) -> None:
    """landlock_restrict_self(2); needs no_new_privs."""
    _check(_libc.syscall(446, ruleset, 0), "landlock_restrict_self")


def trim_heap() -> None:
    """malloc_trim(3), where the C library has it: pages of the heap that hold nothing would be copied for every guest."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(ctypes.c_size_t(0))


def cpu_clock_of(pid: int) -> int:
    """clock_getcpuclockid(3): the clock of a process's CPU time, all its threads together."""
    return (~pid << 3) | 2
