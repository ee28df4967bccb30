"""The namespaces and the file system of a worker: a root of its own with nothing in it but the interpreter's libraries.

Loaded by path in a worker; standard library only. There is no /proc inside: nothing in it is needed, much of it is a way out.
"""

from __future__ import annotations

import os
import sys

import forebay_linux as linux  # the worker registers linux.py under this name

INNER_ID = 1000
NOBODY = 65534
BOX = "/tmp"  # of the sandbox's own root, a private tmpfs
BOX_BYTES = 64 << 20
_BOX_OPTIONS = f"size={BOX_BYTES},nr_inodes=4096,mode=0700"
DEVICES = ("null", "zero", "full", "random", "urandom")


def library_paths(extra: list[str]) -> list[str]:
    """Folders that an interpreter needs to import the standard library and load shared objects, and ``extra``; nested ones left out."""
    wanted = ["/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"]
    wanted += [os.path.join(sys.base_prefix, "lib"), os.path.join(sys.base_prefix, "lib64"), *sys.path, *extra]
    found: list[str] = []
    for path in wanted:
        inside = any(path == other or path.startswith(other + "/") for other in found)
        if path.startswith("/") and os.path.isdir(path) and not inside:
            found.append(path)
    return found


def enter_namespaces(paths: list[str]) -> None:
    """Put this process into its own user, mount, net, ipc and uts namespaces with a root of its own, where ``paths`` can be read;
    its next child is PID 1.

    As root the process becomes ``nobody`` first, so that what runs inside is no one on the host either way.

    Raises:
        OSError: the kernel or its configuration refuses a step; the process is then good for nothing.
    """
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    if os.geteuid() == 0:
        linux.unshare(linux.CLONE_NEWNS)
        _build_root(paths)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        linux.prctl(linux.PR_SET_DUMPABLE, 1)  # else /proc/self belongs to root and the id maps can't be written
    else:
        uid, gid = os.geteuid(), os.getegid()
        linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS)
        _map_ids(proc, uid, gid)
        _build_root(paths)
    uid, gid = os.geteuid(), os.getegid()
    network = linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS
    linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS | linux.CLONE_NEWPID | network)
    _map_ids(proc, uid, gid)
    _write(proc, "sys/user/max_user_namespaces", "0")  # none nested in ours, with or without seccomp
    os.close(proc)


def _map_ids(proc: int, uid: int, gid: int) -> None:
    _write(proc, "self/setgroups", "deny")
    _write(proc, "self/uid_map", f"{INNER_ID} {uid} 1")
    _write(proc, "self/gid_map", f"{INNER_ID} {gid} 1")


def _write(proc: int, name: str, text: str) -> None:
    descriptor = os.open(name, os.O_WRONLY, dir_fd=proc)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _build_root(paths: list[str]) -> None:
    base = "/tmp"  # only a mount point that exists everywhere; nothing is written to the host's
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", base, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1048576,mode=0755")
    os.mkdir(base + "/.host")
    linux.pivot_root(base, base + "/.host")
    os.chdir("/")
    os.umask(0o022)
    for path in paths:
        _bind_folder(path)
    os.makedirs("/dev", exist_ok=True)
    for name in DEVICES:
        os.close(os.open(f"/dev/{name}", os.O_CREAT | os.O_WRONLY, 0o644))
        linux.mount(f"/.host/dev/{name}", f"/dev/{name}", None, linux.MS_BIND)
    os.makedirs("/proc", exist_ok=True)
    linux.mount(
        "/.host/proc", "/proc", None, linux.MS_BIND | linux.MS_REC
    )  # the kernel gives a new one only to who sees one
    os.makedirs(BOX, exist_ok=True)
    os.symlink(BOX, "/dev/shm")
    linux.umount("/.host")
    os.rmdir("/.host")
    linux.mount(None, "/", None, linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV)


def _bind_folder(path: str) -> None:
    source = "/.host" + path
    if os.path.islink(source):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(os.readlink(source), path)
        return
    os.makedirs(path, exist_ok=True)
    linux.mount(source, path, None, linux.MS_BIND | linux.MS_REC)
    flags = os.statvfs(path).f_flag  # flags of the host's mount are locked: a remount must repeat them
    keep = flags & (linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC | linux.MS_NOATIME | linux.MS_NODIRATIME)
    keep |= linux.MS_RELATIME if flags & 4096 else 0
    secure = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
    linux.mount(None, path, None, linux.MS_REMOUNT | linux.MS_BIND | secure | keep)


def mount_box() -> None:
    """The box: a private tmpfs, also /dev/shm. Called by PID 1, once."""
    linux.mount("tmpfs", BOX, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, _BOX_OPTIONS)


def open_proc() -> int:
    """Descriptor of a /proc of this pid namespace that no path leads to, for its PID 1 alone; -1 where the kernel refuses one
    (as in containers that hide parts of the host's). Afterwards /proc is empty."""
    try:
        linux.mount("proc", BOX, "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
        proc = os.open(BOX, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        linux.umount(BOX)
    except OSError:
        proc = -1
    # The host's can't be unmounted from in here, so it is covered; only who may unmount (none of the guests) gets under it.
    linux.mount(
        "tmpfs", "/proc", "tmpfs", linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC, "size=4096"
    )
    return proc


def wipe(box: str) -> None:
    """Delete all that is in the box: never through a link, and whatever the modes are.

    Raises:
        OSError: something can't be deleted; the worker must not be used again.
    """
    os.chmod(box, 0o700)
    os.chdir(
        box
    )  # and down from there by single names: a guest may have nested folders to paths that are too long to be said
    levels = [_clear_folder()]
    inside: list[str] = []
    while True:
        if levels[-1]:
            name = levels[-1].pop()
            os.chmod(name, 0o700)
            os.chdir(name)
            inside.append(name)
            levels.append(_clear_folder())
        elif inside:
            levels.pop()
            os.chdir("..")
            os.rmdir(inside.pop())
        else:
            return


def _clear_folder() -> list[str]:
    """Delete the files of the working folder; its folders."""
    folders = []
    with os.scandir(".") as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            else:
                os.unlink(entry.name)
    return folders
