"""The Linux calls that Python 3.11 does not have, through ctypes. Each function names its manual page.

Loaded by path in a worker; standard library only. Numbers are of x86_64 and aarch64; other machines have no seccomp rung here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_NOATIME, MS_NODIRATIME, MS_BIND, MS_REC, MS_PRIVATE, MS_RELATIME = 1024, 2048, 4096, 16384, 1 << 18, 1 << 21
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_SET_CHILD_SUBREAPER = 1, 4, 22, 38, 36


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


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
    _check(_libc.syscall(_NUMBERS["pivot_root"], new_root.encode(), put_old.encode()), "pivot_root")


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument."""
    _check(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def drop_capabilities() -> None:
    """capset(2): none effective, permitted or inheritable."""
    header = struct.pack("=Ii", 0x20080522, 0)
    _check(_libc.capset(header, struct.pack("=6I", 0, 0, 0, 0, 0, 0)), "capset")


# --- seccomp(2): a deny-list that answers EPERM, as programs that probe expect ---

_X86 = (
    "socket=41 shmget=29 shmat=30 clone=56 fork=57 vfork=58 execve=59 kill=62 semget=64 msgget=68 ptrace=101 syslog=103 "
    "rt_sigqueueinfo=129 personality=135 setpriority=141 sched_setparam=142 sched_setscheduler=144 modify_ldt=154 "
    "pivot_root=155 chroot=161 acct=163 mount=165 umount2=166 swapon=167 swapoff=168 reboot=169 sethostname=170 "
    "setdomainname=171 init_module=175 delete_module=176 quotactl=179 tkill=200 sched_setaffinity=203 tgkill=234 mq_open=240 "
    "kexec_load=246 add_key=248 request_key=249 keyctl=250 ioprio_set=251 migrate_pages=256 unshare=272 move_pages=279 "
    "rt_tgsigqueueinfo=297 perf_event_open=298 fanotify_init=300 prlimit64=302 name_to_handle_at=303 open_by_handle_at=304 "
    "setns=308 process_vm_readv=310 process_vm_writev=311 kcmp=312 finit_module=313 sched_setattr=314 memfd_create=319 "
    "kexec_file_load=320 bpf=321 execveat=322 userfaultfd=323"
)
_ARM = (
    "ioprio_set=30 umount2=39 mount=40 pivot_root=41 chroot=51 quotactl=60 acct=89 personality=92 unshare=97 kexec_load=104 "
    "init_module=105 delete_module=106 syslog=116 ptrace=117 sched_setparam=118 sched_setscheduler=119 sched_setaffinity=122 "
    "kill=129 tkill=130 tgkill=131 rt_sigqueueinfo=138 setpriority=140 reboot=142 sethostname=161 setdomainname=162 mq_open=180 "
    "msgget=186 semget=190 shmget=194 shmat=196 socket=198 add_key=217 request_key=218 keyctl=219 clone=220 execve=221 "
    "swapon=224 swapoff=225 migrate_pages=238 move_pages=239 rt_tgsigqueueinfo=240 perf_event_open=241 prlimit64=261 "
    "fanotify_init=262 name_to_handle_at=264 open_by_handle_at=265 setns=268 process_vm_readv=270 process_vm_writev=271 "
    "kcmp=272 finit_module=273 sched_setattr=274 memfd_create=279 bpf=280 execveat=281 userfaultfd=282 kexec_file_load=294"
)
_COMMON = (
    "pidfd_send_signal=424 io_uring_setup=425 io_uring_enter=426 io_uring_register=427 open_tree=428 move_mount=429 fsopen=430 "
    "fsconfig=431 fsmount=432 fspick=433 pidfd_open=434 clone3=435 pidfd_getfd=438 process_madvise=440 mount_setattr=442 "
    "memfd_secret=447"
)
_TABLES = {"x86_64": (0xC000003E, _X86), "aarch64": (0xC00000B7, _ARM)}
_ARCH, _TABLE = _TABLES.get(platform.machine(), (0, ""))
_NUMBERS = {name: int(number) for name, number in (item.split("=") for item in (_TABLE + " " + _COMMON).split())}
_SIGNALS = {"kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo"}
_LD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_CLONE_THREAD = 0x00010000


def seccomp_program(*, deny_signals: bool) -> bytes:
    """BPF of the filter: threads may start, processes may not; no sockets, no exec, no kernel surface off the beaten path.

    Raises:
        OSError: ENOSYS on a machine whose call numbers are not known here.
    """
    if not _ARCH:
        raise OSError(errno.ENOSYS, f"no system call table for {platform.machine()}")
    deny, nosys = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
    code = [(_LD, 0, 0, 4), (_JEQ, 1, 0, _ARCH), (_RET, 0, 0, _KILL), (_LD, 0, 0, 0)]
    if platform.machine() == "x86_64":
        code += [(_JGE, 0, 1, 0x40000000), (_RET, 0, 0, _KILL)]  # the x32 calls
    code += [
        (_JEQ, 0, 1, _NUMBERS["clone3"]),
        (_RET, 0, 0, nosys),
    ]  # its flags are in memory; glibc falls back to clone
    code += [(_JEQ, 0, 4, _NUMBERS["clone"]), (_LD, 0, 0, 16), (_JSET, 0, 1, _CLONE_THREAD)]
    code += [(_RET, 0, 0, _ALLOW), (_RET, 0, 0, deny)]
    code += [(_JEQ, 0, 4, _NUMBERS["prlimit64"]), (_LD, 0, 0, 16), (_JEQ, 0, 1, 0)]  # own limits only
    code += [(_RET, 0, 0, _ALLOW), (_RET, 0, 0, deny)]
    skip = {"clone", "clone3", "prlimit64"} | (set() if deny_signals else _SIGNALS)
    denied = [number for name, number in _NUMBERS.items() if name not in skip]
    code += [(_JEQ, len(denied) - index, 0, number) for index, number in enumerate(denied)]
    code += [(_RET, 0, 0, _ALLOW), (_RET, 0, 0, deny)]
    return b"".join(struct.pack("=HBBI", *item) for item in code)


def install_seccomp(program: bytes) -> None:
    """seccomp(2) through prctl; needs no_new_privs."""
    buffer = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("@HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(PR_SET_SECCOMP, 2, fprog, 0, 0), "seccomp")


# --- landlock(7): what a process may touch in the file system, where there is no mount namespace ---

_READ = 1 << 0 | 1 << 2 | 1 << 3  # execute (for shared libraries), read a file, read a folder
_READ_FILE, _WRITE_FILE, _TRUNCATE = 1 << 2, 1 << 1, 1 << 14
_FS_BY_ABI = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}


def landlock_ruleset(readable: list[str], box: str) -> int:
    """Descriptor of a ruleset: read ``readable``, do anything in ``box``, nothing else.

    Raises:
        OSError: no Landlock here, or older than ABI 3 (which can't refuse truncation).
    """
    abi = _check(_libc.syscall(444, None, ctypes.c_size_t(0), 1), "landlock")
    if abi < 3:
        raise OSError(errno.ENOSYS, f"Landlock ABI {abi} is too old")
    everything = _FS_BY_ABI.get(abi, (1 << 16) - 1)
    attributes = [everything, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0]
    raw = struct.pack("=3Q", *attributes)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = _check(_libc.syscall(444, raw, ctypes.c_size_t(len(raw)), 0), "landlock_create_ruleset")
    for path in readable:
        _landlock_allow(ruleset, path, _READ if os.path.isdir(path) else _READ_FILE | _WRITE_FILE | _TRUNCATE)
    _landlock_allow(ruleset, box, everything)
    return ruleset


def _landlock_allow(ruleset: int, path: str, access: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", access, descriptor)
        _check(_libc.syscall(445, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
    finally:
        os.close(descriptor)


def install_landlock(ruleset: int) -> None:
    """landlock_restrict_self(2); needs no_new_privs."""
    _check(_libc.syscall(446, ruleset, 0), "landlock_restrict_self")


def close_other_descriptors(first: int) -> None:
    """close_range(2) from ``first`` upwards."""
    _check(_libc.syscall(436, ctypes.c_uint(first), ctypes.c_uint(0xFFFFFFFF), 0), "close_range")


def cpu_clock_of(pid: int) -> Any:
    """clock_getcpuclockid(3): the clock of a process's CPU time, all its threads together."""
    return (~pid << 3) | 2
