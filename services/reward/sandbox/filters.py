"""seccomp programs for workers and guests, made by libseccomp on the judge's side and sent to the worker as BPF.

Deny-lists: the calls that programs probe answer EPERM, as a program expects that may run anywhere. libseccomp's own prologue kills a
process that calls with another architecture's numbers (32-bit, x32).
"""

from __future__ import annotations

import contextlib
import tempfile
from dataclasses import dataclass
from errno import ENOSYS, EPERM
from functools import cache
from typing import Any

# Nothing that runs in a sandbox needs these; most of them are surface of the kernel off the beaten path.
_NEVER = [
    "acct",
    "add_key",
    "bpf",
    "chroot",
    "delete_module",
    "fanotify_init",
    "finit_module",
    "fsconfig",
    "fsmount",
    "fsopen",
    "fspick",
    "init_module",
    "io_uring_enter",
    "io_uring_register",
    "io_uring_setup",
    "ioprio_set",
    "kcmp",
    "kexec_file_load",
    "kexec_load",
    "keyctl",
    "lookup_dcookie",
    "memfd_create",
    "memfd_secret",
    "migrate_pages",
    "modify_ldt",
    "mount",
    "mount_setattr",
    "move_mount",
    "move_pages",
    "mq_open",
    "msgget",
    "name_to_handle_at",
    "open_by_handle_at",
    "open_tree",
    "perf_event_open",
    "personality",
    "pidfd_getfd",
    "pidfd_send_signal",
    "pivot_root",
    "process_madvise",
    "process_mrelease",
    "process_vm_readv",
    "process_vm_writev",
    "ptrace",
    "quotactl",
    "quotactl_fd",
    "reboot",
    "request_key",
    "sched_setaffinity",
    "sched_setattr",
    "sched_setparam",
    "sched_setscheduler",
    "semget",
    "setdomainname",
    "sethostname",
    "setns",
    "setpriority",
    "shmat",
    "shmget",
    "socket",
    "swapoff",
    "swapon",
    "syslog",
    "umount2",
    "unshare",
    "userfaultfd",
    "vhangup",
]
# Landlock does not restrict these, and where there is no root of its own the files of the host are in sight. In the box they mean
# nothing to a program, and copying a file would fail without them: they answer that they are done, and do nothing.
_ATTRIBUTES = ("chmod", "fchmod", "fchmodat", "fchmodat2", "utime", "utimes", "utimensat", "futimesat")
_MORE_ATTRIBUTES = ("chown", "fchown", "lchown", "fchownat", "setxattr", "lsetxattr", "fsetxattr", "setxattrat", "removexattr",
                    "lremovexattr", "fremovexattr", "removexattrat", "file_setattr")  # fmt: skip
_SIGNALS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*: user, pid, net, mount, uts, ipc, cgroup
_CLONE_THREAD = 0x00010000


@dataclass(frozen=True)
class Filters:
    """BPF programs. ``worker`` lies under all of them in a worker's namespaces; elsewhere each guest installs it too."""

    worker: bytes
    guest: bytes  # one process, no exec
    processes: bytes  # may fork, may not exec
    native: bytes  # may exec, may not fork
    landlock: bytes  # where there is no pid namespace: no signals to anyone
    landlock_worker: bytes  # ``worker``, where there are no namespaces: the host's files keep their attributes too

    def parts(self, level: str) -> tuple[bytes, ...]:
        """In the order in which a worker expects them."""
        worker = self.worker if level == "namespaces" else self.landlock_worker
        return (worker, self.guest, self.processes, self.native, self.landlock)


class NoSeccomp(Exception):
    """libseccomp is not installed, or does not know this machine."""


@cache
def filters() -> Filters:
    """The programs for this machine.

    Raises:
        NoSeccomp: there is no libseccomp.
    """
    try:
        import pyseccomp
    except (ImportError, OSError, RuntimeError) as error:
        raise NoSeccomp(f"libseccomp can't be loaded ({error}); install the package libseccomp2") from None
    fork, exec_ = ("fork", "vfork"), ("execve", "execveat")

    def program(
        names: Any, *, no_processes: bool = False, namespaces: bool = False, pretended: tuple[str, ...] = ()
    ) -> bytes:
        made = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
        for name in pretended:
            _deny(pyseccomp, made, 0, name)
        for name in names:
            _deny(pyseccomp, made, EPERM, name)
        if no_processes:  # threads only
            _deny(pyseccomp, made, EPERM, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, _CLONE_THREAD, 0))
        if namespaces:
            for bit in range(32):
                if _NEW_NAMESPACES >> bit & 1:
                    _deny(pyseccomp, made, EPERM, "clone", pyseccomp.Arg(0, pyseccomp.MASKED_EQ, 1 << bit, 1 << bit))
            _deny(pyseccomp, made, ENOSYS, "clone3")  # its flags are in memory, out of sight; glibc falls back to clone
            _deny(pyseccomp, made, EPERM, "prlimit64", pyseccomp.Arg(0, pyseccomp.NE, 0))  # one's own limits only
        with tempfile.TemporaryFile() as file:
            made.export_bpf(file)
            file.seek(0)
            return file.read()

    return Filters(
        worker=program(_NEVER, namespaces=True),
        guest=program(fork + exec_, no_processes=True),
        processes=program(exec_),
        native=program(fork, no_processes=True),
        landlock=program(_SIGNALS),
        landlock_worker=program([*_NEVER, *_MORE_ATTRIBUTES], namespaces=True, pretended=_ATTRIBUTES),
    )


def _deny(pyseccomp: Any, made: Any, number: int, name: str, *arguments: Any) -> None:
    with contextlib.suppress(OSError):  # not a call of this machine, or younger than the installed libseccomp
        made.add_rule(pyseccomp.ERRNO(number), name, *arguments)
