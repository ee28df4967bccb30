"""The self-test of a sandbox worker: a program that looks for what it must not find. Pure; ``lab.py`` runs it.

What a candidate could find of the judge's, it would find with this: the canary that it gets as input is in the judge's memory, as expected
values are.
"""

from __future__ import annotations

from protocol.suites import Limits

LIMITS = Limits(cpu_s=10, wall_s=60)
PROBE = """
import gc, os, sys
frame, seen = sys._getframe(), []
while frame:
    seen += [frame.f_locals, frame.f_globals]
    frame = frame.f_back
seen += [o for o in gc.get_objects() if isinstance(o, (str, bytes, list, tuple))]
for fd in range(256):
    if fd > 2:
        try:
            os.read(fd, 1)
            print('descriptor', fd)
        except OSError:
            pass
text = repr(seen) + repr(dict(os.environ)) + repr(sys.argv)
for path in ('/etc/passwd', '/proc/1/environ', '/proc/self/status', '/root', '/home'):
    try:
        os.listdir(path) if os.path.isdir(path) else open(path).read()
        print('readable', path)
    except OSError:
        pass
try:
    os.fork() or os._exit(0)
    print('forked')
except OSError:
    pass
print('found' if input() in text else 'nothing')
"""


def problem(exit_code: int, stdout: bytes, stderr: bytes, *, isolated: bool) -> str:
    """What is wrong with the worker that ``PROBE`` ran on, or "". Without isolation the probe may find a way out, but never the canary."""
    said = stdout.decode("utf-8", "replace").split("\n")
    if exit_code or "nothing" not in said:
        return (
            f"The sandbox's self-test failed: exit code {exit_code}, {said} {stderr.decode('utf-8', 'replace')[-300:]}. "
            "Is reward.python a CPython >= 3.10?"
        )
    if len(said) > 2 and isolated:
        return f"The sandbox's self-test got out of it: {', '.join(said[:-2])}."
    return ""
