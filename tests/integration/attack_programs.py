"""Hostile Python, line by line of SANDBOX 2.3: each defines (or prevents) ``f(a, b)``, and none computes ``a + b``.

``S12 name`` belongs to line S12. Besides the code there is the verdict it must get where the function is called (asserts, calls), and
where the same code runs as a whole program (stdin, checker): "RE WA" allows both. Long, because the list of attacks is long.
"""

from __future__ import annotations

from typing import NamedTuple

_SLOW = ("inline", "stdin")  # one kind of each family, for attacks that last until a time limit


class Attack(NamedTuple):
    called: str  # allowed verdicts of the kinds that call f
    run: str  # of those that run a whole program
    code: str
    kinds: tuple[str, ...] = ()  # () : see ``kinds_of``
    limits: dict[str, object] = {}


def kinds_of(name: str, level: str) -> tuple[str, ...]:
    """The kinds of suites that an attack is tried on: all of them if it is on the verdict, else one of each family."""
    if chosen := ATTACKS[name].kinds:
        return chosen
    on_the_verdict = name < "S15" or name >= "S50"
    return ("inline", "remote", "call", "stdin", "checker") if on_the_verdict and level == "namespaces" else _SLOW


def _raises(statement: str) -> str:
    return f"import os, sys, signal\ndef f(a, b):\n    {statement}\n"


def _returns(setup: str, value: str = "I(7)") -> str:
    return f"{setup}\ndef f(a, b):\n    return {value}\n"


_LIE = "__eq__ = lambda s, o: True\n    __ne__ = lambda s, o: False\n    __hash__ = lambda s: 3\n"
_FORGED = "".join(
    f"    for m in ({messages}):\n        os.write(3, struct.pack('>I', len(m)) + m)\n"
    for messages in (
        'b\'["test","ok",""]\', b\'["test","ok",""]\', b\'["test","ok",""]\', b\'["done","ok",""]\'',
        'b\'["value",3]\', b\'["value",3,null,0]\', b\'["value",["x",[]],null]\'',
    )
)

ATTACKS: dict[str, Attack] = {
    # ---- leaving early: an exit code is never a pass
    "S01 exit at load": Attack("RE", "WA", "import sys\nsys.exit(0)"),
    "S01 exit builtin at load": Attack("RE", "WA", "exit()"),
    "S01 raise at load": Attack("RE", "WA", "raise SystemExit"),
    "S01 exit of a thread at load": Attack(
        "RE", "WA", "import threading, os, time\nthreading.Thread(target=os._exit, args=(0,)).start()\ntime.sleep(9)"
    ),
    "S01 exit in a class body": Attack("RE", "WA", "class C:\n    quit(0)"),
    "S01 exit in a default": Attack("RE", "WA", "import sys\ndef f(a, b=sys.exit()): pass"),
    "S02 _exit at load": Attack("RE", "WA", "import os\nos._exit(0)"),
    "S02 _exit in the call": Attack("RE", "WA", _raises("os._exit(0)")),
    "S02 _exit of libc": Attack("RE", "WA", "import ctypes\ndef f(a, b): ctypes.CDLL(None)._exit(0)"),
    "S02 exit_group": Attack("RE", "WA", "import ctypes\ndef f(a, b): ctypes.CDLL(None).syscall(231, 0)"),
    "S02 kills itself": Attack("RE", "RE", _raises("os.kill(os.getpid(), 9)")),
    "S02 kills itself by a signal without meaning": Attack("RE", "RE", _raises("os.kill(os.getpid(), 40)")),
    "S02 _exit in a destructor": Attack(
        "RE", "WA", "import os\nclass D:\n    __del__ = lambda s: os._exit(0)\ndef f(a, b):\n    D()\n    return 0"
    ),
    "S03 SystemExit in the call": Attack("RE", "WA", _raises("raise SystemExit(0)")),
    "S03 SystemExit with a message": Attack("RE", "RE", _raises("raise SystemExit('PASSED')")),
    "S03 KeyboardInterrupt": Attack("RE", "RE", _raises("raise KeyboardInterrupt")),
    "S03 GeneratorExit": Attack("RE", "RE", _raises("raise GeneratorExit")),
    "S03 a BaseException of its own": Attack("RE", "RE", "class B(BaseException): pass\ndef f(a, b): raise B"),
    "S03 AssertionError": Attack("RE", "RE", _raises("raise AssertionError")),
    "S03 StopIteration": Attack("RE", "RE", _raises("raise StopIteration(a + b)")),
    "S03 exception whose text exits": Attack(
        "RE", "RE WA", "import os\nclass E(Exception):\n    __str__ = lambda s: os._exit(0)\ndef f(a, b): raise E"
    ),
    # ---- lying values
    "S04 always equal": Attack("WA", "WA", _returns(f"class I:\n    {_LIE}", "I()")),
    "S04 always equal, claims to be an int": Attack(
        "WA", "WA", _returns(f"class I:\n    {_LIE}    __class__ = property(lambda s: int)", "I()")
    ),
    "S04 a class whose metaclass is always equal": Attack(
        "WA", "WA", _returns(f"class M(type):\n    {_LIE}class I(metaclass=M): pass", "I")
    ),
    "S04 every operator says yes": Attack(
        "WA RE",
        "WA RE",
        _returns(
            f"class I:\n    {_LIE}    __getattr__ = lambda s, n: (lambda *a: s)\n    __sub__ = __rsub__ = __abs__ = lambda s, *a: 0", "I()"
        ),
    ),
    "S04 equal to all, in a list": Attack("WA", "WA", _returns(f"class I:\n    {_LIE}", "[I()]")),
    "S04 a mock": Attack("WA", "WA", "from unittest.mock import ANY\ndef f(a, b): return ANY"),
    "S04 not implemented": Attack("WA", "WA", _returns("", "NotImplemented")),
    "S04 the function itself": Attack("WA", "WA", _returns("", "f")),
    "S05 int": Attack("WA", "WA", _returns(f"class I(int):\n    {_LIE}")),
    "S05 int whose repr is right": Attack(
        "WA", "WA", _returns(f"class I(int):\n    {_LIE}    __repr__ = __str__ = lambda s: '3'")
    ),
    "S05 float": Attack("WA", "WA", _returns(f"class I(float):\n    {_LIE}")),
    "S05 str": Attack("WA", "WA", _returns(f"class I(str):\n    {_LIE}", "I('7')")),
    "S05 list": Attack(
        "WA", "WA", _returns(f"class I(list):\n    {_LIE}    __len__ = lambda s: 1\n    __iter__ = lambda s: iter([3])", "I()")
    ),
    "S05 tuple": Attack("WA", "WA", _returns(f"class I(tuple):\n    {_LIE}", "I()")),
    "S05 dict": Attack("WA", "WA", _returns(f"class I(dict):\n    {_LIE}    items = lambda s: 1/0", "I()")),
    "S05 set": Attack("WA", "WA", _returns(f"class I(set):\n    {_LIE}", "I()")),
    "S05 bool for an int": Attack("WA", "WA", _returns("", "True")),
    "S05 index and int": Attack(
        "WA", "WA", _returns("class I:\n    __index__ = __int__ = lambda s: 3\n    __float__ = lambda s: 3.0", "I()")
    ),
    "S05 int with a lying mro": Attack(
        "WA RE", "WA RE", _returns("class M(type):\n    mro = lambda c: [c, int, object]\nclass I(metaclass=M): pass", "I()")
    ),
    "S05 fraction": Attack(
        "WA", "WA RE", _returns(f"from fractions import Fraction\nclass I(Fraction):\n    {_LIE}", "I(7)")
    ),
    # ---- the interpreter patched
    "S06 builtins": Attack(
        "WA RE",
        "WA RE",
        "import builtins\nfor n in ('all', 'any', 'isinstance', 'len', 'abs', 'sum', 'bool', 'sorted', 'hasattr', 'issubclass'):\n"
        "    setattr(builtins, n, lambda *a, **k: True)\ndef f(a, b): return 0",
    ),
    "S06 open and print": Attack(
        "WA", "WA", "import builtins\nbuiltins.open = builtins.print = lambda *a, **k: None\ndef f(a, b): return 0"
    ),
    "S06 type and int": Attack(
        "WA RE", "WA RE", "import builtins\nbuiltins.type = lambda x: int\nbuiltins.int = lambda *a, **k: 3\ndef f(a, b): return 0"
    ),
    "S06 the encoder": Attack(
        "WA",
        "WA",
        "import sys\nfor m in list(sys.modules.values()):\n    if hasattr(m, 'Encoder'):\n        m.Encoder.encode = lambda s, v: 3\ndef f(a, b): return 0",
    ),
    "S06 json": Attack("WA RE", "WA", "import json\njson.dumps = lambda *a, **k: '[\"ok\"]'\ndef f(a, b): return 0"),
    "S06 the guest's module": Attack(
        "WA RE",
        "WA",
        "import sys\nm = sys.modules.get('forebay_guest')\nif m:\n    m._answer = lambda *a: b'[\"value\",3,null]'\n"
        "    m.write_frame = lambda body: None if b'raised' in body else 1/0\ndef f(a, b): return 0",
    ),
    "S06 code of the server's frame": Attack(
        "WA RE",
        "WA",
        "import sys\ndef f(a, b):\n    frame = sys._getframe()\n    while frame:\n        for n, v in list(frame.f_locals.items()):\n"
        "            if callable(getattr(v, 'encode', None)) and not isinstance(v, str): v.encode = lambda x: 3\n"
        "        frame = frame.f_back\n    return 0",
    ),
    "S07 AssertionError": Attack(
        "WA", "WA", "import builtins\nbuiltins.AssertionError = type('E', (Exception,), {'__init__': lambda *a: 1/0})\ndef f(a, b): return 0"
    ),
    "S07 excepthook": Attack(
        "RE", "WA", "import sys, os\nsys.excepthook = lambda *a: os._exit(0)\ndef f(a, b): raise KeyError"
    ),
    "S07 unittest": Attack(
        "WA", "WA", "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\nunittest.TestCase.run = lambda *a: None\ndef f(a, b): return 0"
    ),
    "S07 hooks in files": Attack(
        "WA",
        "WA",
        "for n in ('conftest', 'sitecustomize', 'usercustomize', 'json', 'main', 'solution', 'tests', 'math', 'guest', 'values'):\n"
        "    open(n + '.py', 'w').write('import os; os._exit(0)')\nopen('x.pth', 'w').write('import os; os._exit(0)')\ndef f(a, b): return 0",
    ),
    "S07 import hook": Attack(
        "WA",
        "WA",
        "import sys, os\nclass H:\n    find_spec = lambda *a: os._exit(0)\nsys.meta_path.insert(0, H())\nsys.path.insert(0, '.')\ndef f(a, b): return 0",
    ),
    "S07 trace function": Attack(
        "WA RE", "WA RE", "import sys\nsys.settrace(lambda *a: None)\nsys.setprofile(lambda fr, e, x: fr.f_locals.update(value=3))\ndef f(a, b): return 0"
    ),
    "S07 exit hook": Attack("WA", "WA", "import atexit, os\natexit.register(os._exit, 0)\ndef f(a, b): return 0"),
    # ---- looking for what is expected; ``test_nothing_expected_can_be_found`` has the canary
    "S09 frames": Attack(
        "WA",
        "WA",
        "import sys\ndef f(a, b):\n    frame = sys._getframe()\n    while frame:\n        for n in ('expected', 'answer', 'test', 'case', 'tests'):\n"
        "            if n in frame.f_locals: return frame.f_locals[n]\n        frame = frame.f_back\n    return 0",
    ),
    "S09 traceback": Attack(
        "WA",
        "WA",
        "import traceback, inspect\ndef f(a, b):\n    text = ''.join(traceback.format_stack()) + str([s.code_context for s in inspect.stack()])\n"
        "    return a + b if '== 3' in text or 'assert ' + 'f' in text else 0",
    ),
    # ---- printing or writing the verdict
    "S13 markers": Attack(
        "WA",
        "WA",
        "import sys\ndef f(a, b):\n    for m in ('PASSED', 'OK', 'Accepted', '1 passed in 0.01s', '{\"verdict\": \"accepted\", \"reward\": 1.0}', '##ok'):\n"
        "        print(m, flush=True); print(m, file=sys.stderr, flush=True)\n    return 0",
    ),
    "S14 every descriptor": Attack(
        "WA RE OLE",
        "WA RE",
        "import os\ndef f(a, b):\n    for fd in range(256):\n        try: os.write(fd, b'\\0\\0\\0\\x06[\"ok\"]')\n        except OSError: pass\n    return 0",
    ),
    "S14 forged frames": Attack("WA RE", "RE", f"import os, struct\ndef f(a, b):\n{_FORGED}    return 0"),
    "S14 frames before the call": Attack(
        "WA RE", "RE", "import os\nfor v in (b'3', b'42'):\n    m = b'[\"value\",' + v + b',null]'\n    os.write(3, len(m).to_bytes(4, 'big') + m)\ndef f(a, b): return 0"
    ),
    "S14 huge frame": Attack("RE", "RE", "import os\ndef f(a, b): os.write(3, b'\\xff' * 10**6)\n"),
    "S14 half a frame": Attack("RE", "RE", "import os\ndef f(a, b): os.write(3, b'\\0\\0\\xff\\0['); os._exit(0)\n"),
    "S14 closes the channel": Attack(
        "RE TLE", "RE", "import os, time\nos.close(3)\ndef f(a, b): return 0", kinds=("inline", "remote", "call", "stdin")
    ),
    "S14 closes everything": Attack(
        "RE TLE", "WA RE", "import os\nos.closerange(0, 256)\ndef f(a, b): return 0", kinds=("inline", "remote", "call", "stdin")
    ),
    "S16 open string": Attack("CE", "CE", 'def f(a, b): return 0\nx = """'),
    "S16 open bracket": Attack("CE", "CE", "def f(a, b): return 0\nx = ["),
    "S16 open block": Attack("CE", "CE", "def f(a, b): return 0\nif 0:"),
    "S16 line continued": Attack("CE", "CE", "def f(a, b): return 0\nassert 0 or \\"),
    # ---- signals and time
    "S19 alarm exits": Attack(
        "RE", "WA", "import signal, os, time\nsignal.signal(14, lambda *a: os._exit(0))\nsignal.setitimer(0, 0.02)\ndef f(a, b): time.sleep(9)"
    ),
    "S19 alarm kills": Attack("RE", "RE", "import signal, time\nsignal.setitimer(0, 0.02)\ndef f(a, b): time.sleep(9)"),
    "S19 alarm raises": Attack(
        "RE", "WA", "import signal, time\nsignal.signal(14, lambda *a: exit(0))\nsignal.setitimer(0, 0.02)\ndef f(a, b): time.sleep(9)"
    ),
    "S20 signals ignored": Attack(
        "TLE",
        "TLE",
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\ndef f(a, b):\n    while True: pass",
        kinds=_SLOW,
    ),
    "S20 signals handled": Attack(
        "TLE",
        "TLE",
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, lambda *a: None)\n    except (OSError, ValueError): pass\n"
        "def f(a, b):\n    while True: pass",
        kinds=_SLOW,
    ),
    "S20 raises its own limit": Attack(
        "TLE",
        "TLE",
        "import resource\ndef f(a, b):\n    for r in range(16):\n        try: resource.setrlimit(r, (-1, -1))\n        except (OSError, ValueError): pass\n"
        "    while True: pass",
        kinds=_SLOW,
    ),
    "S20 handlers catch everything": Attack(
        "TLE", "TLE", "def f(a, b):\n    while True:\n        try:\n            while True: pass\n        except BaseException: pass", kinds=_SLOW
    ),
    "S21 endless thread": Attack(
        "TLE", "TLE", "import threading\ndef g():\n    while True: pass\nthreading.Thread(target=g).start()\ndef f(a, b): g()", kinds=_SLOW
    ),
    "S21 sixteen threads burn": Attack(
        "TLE",
        "TLE",
        "import threading\ndef g():\n    while True: sum(range(10**6))\nfor _ in range(16): threading.Thread(target=g, daemon=True).start()\ndef f(a, b): g()",
        kinds=_SLOW,
    ),
    # ---- processes
    "S22 fork": Attack("RE", "RE", "import os\ndef f(a, b):\n    os.fork() or os._exit(0)"),
    "S22 double fork": Attack(
        "RE", "RE", "import os\ndef f(a, b):\n    if os.fork() == 0:\n        os.setsid()\n        if os.fork() == 0:\n            while True: pass\n    return a + b"
    ),
    "S22 forkpty": Attack("RE", "RE", "import os\ndef f(a, b):\n    os.forkpty()\n    return a + b"),
    "S22 posix_spawn": Attack("RE", "RE", "import os\ndef f(a, b):\n    os.posix_spawn('/bin/true', ['true'], {})\n    return a + b"),
    "S22 exec": Attack("RE", "RE", "import os\ndef f(a, b): os.execv('/bin/true', ['true'])"),
    "S22 exec of the interpreter": Attack(
        "RE", "RE", "import os, sys\ndef f(a, b): os.execv(sys.executable or '/usr/bin/python3', ['python3', '-c', 'print(3)'])"
    ),
    "S22 exec of the loader": Attack(
        "RE", "RE", "import os\ndef f(a, b): os.execv('/lib64/ld-linux-x86-64.so.2', ['ld', '/bin/true'])"
    ),
    "S22 subprocess": Attack(
        "RE", "RE", "import subprocess\ndef f(a, b): return a + b if subprocess.run(['/bin/true']).returncode == 0 else 0"
    ),
    "S22 system": Attack("WA", "WA", "import os\ndef f(a, b): return a + b if os.system('true') == 0 else 0"),
    "S22 raw vfork": Attack(
        "WA RE", "WA RE", "import ctypes\nL = ctypes.CDLL(None)\ndef f(a, b): return a + b if L.syscall(58) >= 0 else 0"
    ),
    "S23 fork bomb": Attack("RE", "RE", "import os\ndef f(a, b):\n    while True: os.fork()"),
    "S23 stubborn fork bomb": Attack(
        "TLE", "TLE", "import os\ndef f(a, b):\n    while True:\n        try: os.fork()\n        except OSError: pass", kinds=_SLOW
    ),
    "S23 thread bomb": Attack(
        "RE TLE MLE",
        "RE TLE MLE",
        "import threading, time\ndef f(a, b):\n    while True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
    ),
    # ---- memory
    "S26 bytearray": Attack("MLE", "MLE", "def f(a, b): return bytearray(10**10)"),
    "S26 list at load": Attack("MLE", "MLE", "x = [0] * 10**11\ndef f(a, b): return 0"),
    "S26 grows": Attack("MLE", "MLE", "def f(a, b):\n    x = []\n    while True: x.append(bytearray(1 << 20))", limits={"cpu_s": 1.0}),
    "S26 grows in a caught loop": Attack(
        "TLE MLE RE", "TLE MLE RE", "x = []\ndef f(a, b):\n    while True:\n        try: x.append(bytearray(1 << 20))\n        except MemoryError: pass", kinds=_SLOW
    ),
    "S26 text": Attack("MLE", "MLE", "def f(a, b): return len('x' * 10**10)"),
    "S26 int": Attack("MLE TLE", "MLE TLE", "def f(a, b): return 1 << (1 << 40)"),
    "S27 shared mapping": Attack("RE MLE", "RE MLE", "import mmap\ndef f(a, b): mmap.mmap(-1, 1 << 33)"),
    "S27 malloc of libc": Attack(
        "WA MLE",
        "WA MLE",
        "import ctypes\nm = ctypes.CDLL(None).malloc\nm.restype = ctypes.c_void_p\nm.argtypes = [ctypes.c_size_t]\n"
        "def f(a, b):\n    return a + b if m(1 << 33) else 0",
    ),
    "S27 file too large": Attack(
        "RE", "RE", "def f(a, b):\n    with open('x', 'wb') as file:\n        for _ in range(65): file.write(bytes(1 << 20))\n    return a + b"
    ),
    "S27 sparse file": Attack("RE", "RE", "def f(a, b):\n    open('x', 'wb').truncate(1 << 40)\n    return a + b"),
    "S27 memfd": Attack("RE", "RE", "import os\ndef f(a, b):\n    os.memfd_create('x')\n    return a + b"),
    # ---- output
    "S28 lines": Attack("OLE", "OLE", "def f(a, b):\n    while True: print('x' * 10**6)"),
    "S28 no line end": Attack("OLE", "OLE", "import os\ndef f(a, b):\n    while True: os.write(1, b'x' * 65536)"),
    "S28 stderr": Attack("OLE", "OLE", "import os\ndef f(a, b):\n    while True: os.write(2, b'x' * 65536)"),
    "S28 both": Attack("OLE", "OLE", "import os\ndef f(a, b):\n    while True: os.write(1, b'x\\n' * 999); os.write(2, b'y')"),
    "S28 by bytes": Attack("OLE TLE", "OLE TLE", "import os\ndef f(a, b):\n    while True: os.write(1, b'x')"),
    "S28 from a thread at load": Attack(
        "OLE", "OLE", "import os, threading\ndef g():\n    while True: os.write(1, bytes(9999))\nthreading.Thread(target=g).start()\ndef f(a, b):\n    while 1: pass"
    ),
    "S28 endless answers": Attack(
        "RE WA",
        "RE",
        "import os\ndef f(a, b):\n    m = b'[\"value\",0,null]'\n    while True: os.write(3, len(m).to_bytes(4, 'big') + m)",
    ),
    "S29 slow output": Attack(
        "TLE", "TLE", "import time\ndef f(a, b):\n    while True: print(1, flush=True); time.sleep(0.05)", kinds=_SLOW, limits={"wall_s": 0.3}
    ),
    "S29 sleeps": Attack("TLE", "TLE", "import time\ndef f(a, b): time.sleep(99)", kinds=_SLOW, limits={"wall_s": 0.3}),
    "S29 waits for input": Attack(
        "TLE RE WA", "RE", "import os\ndef f(a, b):\n    os.read(3, 1)\n    return 0", kinds=_SLOW, limits={"wall_s": 0.3}
    ),
    "S29 stops itself": Attack(
        "TLE", "TLE", "import os, signal\ndef f(a, b): os.kill(os.getpid(), signal.SIGSTOP)", kinds=_SLOW, limits={"wall_s": 0.3}
    ),
    "S29 deadlock": Attack(
        "TLE", "TLE", "import threading\nl = threading.Lock()\ndef f(a, b): l.acquire(); l.acquire()", kinds=_SLOW, limits={"wall_s": 0.3}
    ),
    # ---- parser and recursion bombs
    "S30 brackets": Attack("CE", "CE", "def f(a, b): return " + "(" * 100_000),
    "S30 closed brackets": Attack("CE", "CE", f"def f(a, b): return {'(' * 50_000}1{')' * 50_000}"),
    "S30 lists": Attack("CE", "CE", f"def f(a, b): return {'[' * 5_000}{']' * 5_000}"),
    "S30 minus": Attack("CE", "CE", "def f(a, b): return " + "-" * 100_000 + "1"),
    "S30 not": Attack("CE", "CE", "def f(a, b): return " + "not " * 50_000 + "1"),
    "S30 power": Attack("CE", "CE", "def f(a, b): return " + "2**" * 50_000 + "1"),
    "S30 lambdas": Attack("CE", "CE", "x = " + "lambda:" * 20_000 + "1\ndef f(a, b): return 0"),
    "S30 sum": Attack("CE RE WA TLE", "CE RE WA TLE", "x = " + "1+" * 100_000 + "1\ndef f(a, b): return 0"),
    "S30 attributes": Attack("CE RE TLE", "CE RE TLE", "x = f" + ".a" * 50_000 + "\ndef f(a, b): return 0"),
    "S30 calls": Attack("CE RE TLE", "CE RE TLE", "x = int" + "()" * 50_000 + "\ndef f(a, b): return 0"),
    "S30 blocks": Attack("CE", "CE", "".join(" " * n + "if 1:\n" for n in range(300)) + " " * 300 + "pass\ndef f(a, b): return 0"),
    "S30 f-strings": Attack("CE", "CE", "def f(a, b): return " + "f'{" * 200 + "1"),
    "S30 long name": Attack("RE", "RE", "x" * 200_000 + "\ndef f(a, b): return 0"),
    "S30 huge literal": Attack("WA CE TLE", "WA CE TLE", "x = " + "9" * 200_000 + "\ndef f(a, b): return 0"),
    "S30 folded power": Attack("MLE TLE", "MLE TLE", "def f(a, b): return 9**9**9**9"),
    "S30 deep C recursion": Attack(
        "RE MLE TLE", "RE MLE TLE", "import sys\nsys.setrecursionlimit(10**9)\ndef f(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return len(repr(x))"
    ),
    "S30 deep answer": Attack("RE", "RE", "def f(a, b):\n    x = []\n    for _ in range(10**4): x = [x]\n    return x"),
    "S30 answer that holds itself": Attack("RE", "WA", "def f(a, b):\n    x = []\n    x.append(x)\n    return x"),
    "S31 recursion": Attack("RE", "RE", "def f(a, b): return f(a, b)"),
    "S31 raised limit": Attack("RE MLE TLE", "RE MLE TLE", "import sys\nsys.setrecursionlimit(10**9)\ndef f(a, b): return f(a, b)"),
    "S31 recursion in a thread": Attack(
        "WA RE MLE",
        "WA RE MLE",
        "import sys, threading\nsys.setrecursionlimit(10**9)\nthreading.stack_size(1 << 20)\ndef g(): return [*map(lambda x: g(), [0])]\n"
        "def f(a, b):\n    t = threading.Thread(target=g); t.start(); t.join()\n    return 0",
    ),
    "S32 product": Attack("TLE", "TLE", "import itertools\ndef f(a, b): return max(itertools.product(range(9), repeat=12))", kinds=_SLOW),
    "S32 regex": Attack("TLE", "TLE", "import re\ndef f(a, b): return re.match('(a+)+$', 'a' * 40 + 'b')", kinds=_SLOW),
    "S32 power": Attack("TLE", "TLE", "def f(a, b): return pow(3, 10**8) % 7", kinds=_SLOW),
    "S32 sum": Attack("TLE", "TLE", "def f(a, b): return sum(range(10**12))", kinds=_SLOW),
    "S32 digits": Attack("TLE", "TLE", "def f(a, b): return int('9' * 3_000_000)", kinds=_SLOW),
    "S32 at load": Attack("TLE", "TLE", "sum(range(10**12))", kinds=_SLOW),
    "S32 in the answer": Attack("TLE RE", "WA", "import itertools\ndef f(a, b): return map(lambda x: x, itertools.repeat(1))", kinds=("inline", "call")),
    # ---- the worker, and the host
    "S33 memory of the parent": Attack(
        "RE", "RE", "import os\ndef f(a, b):\n    open(f'/proc/{os.getppid()}/mem', 'rb').read(1)\n    return a + b"
    ),
    "S33 environment of 1": Attack("RE", "RE", "def f(a, b):\n    open('/proc/1/environ').read()\n    return a + b"),
    "S33 own memory": Attack("RE", "RE", "def f(a, b):\n    open('/proc/self/mem', 'r+b')\n    return a + b"),
    "S34 parent": Attack("WA RE", "WA RE", "import os\ndef f(a, b):\n    os.kill(os.getppid(), 9)\n    return 0"),
    "S34 1": Attack("WA RE", "WA RE", "import os\ndef f(a, b):\n    os.kill(1, 9)\n    return 0"),
    "S34 everything reachable": Attack(
        "WA RE TLE",
        "WA RE TLE",
        "import os\ndef f(a, b):\n    for p in (1, os.getppid(), -os.getppid(), -1, 0):\n        for s in (2, 15, 19, 9):\n"
        "            try: os.kill(p, s)\n            except OSError: pass\n    return 0",
        limits={"wall_s": 0.3},
        kinds=("inline", "call", "stdin"),
    ),
    "S34 init's signals": Attack(
        "WA RE",
        "WA RE",
        "import os\ndef f(a, b):\n    for s in (2, 15, 1, 10, 12, 17, 19):\n        try: os.kill(os.getppid(), s)\n        except OSError: pass\n    return 0",
    ),
    "S35 links to the host": Attack(
        "WA",
        "WA",
        "import os\nfor i, t in enumerate(('/etc/passwd', '/usr/lib', '/', '..', '/nowhere', 'self')):\n    os.symlink(t, f'l{i}')\nos.symlink('self', 'self')\ndef f(a, b): return 0",
    ),
    "S35 link in place of the box": Attack(
        "WA RE", "WA RE", "import os\ndef f(a, b):\n    box = os.getcwd()\n    os.chdir('/')\n    os.rmdir(box)\n    os.symlink('/usr', box)\n    return 0"
    ),
    "S36 hard links and pipes": Attack(
        "WA",
        "WA",
        "import os\nopen('a', 'w').close()\nfor i in range(50): os.link('a', f'h{i}')\nos.mkfifo('main'); os.mkfifo('output'); os.mkdir('stdout')\ndef f(a, b): return 0",
    ),
    "S36 device": Attack("RE", "RE", "import os, stat\nos.mknod('d', stat.S_IFBLK | 0o666, os.makedev(8, 0))\ndef f(a, b): return 0"),
    "S36 modes": Attack(
        "WA",
        "WA",
        "import os\nfor i, m in enumerate((0, 0o111, 0o444, 0o1000, 0o4777)):\n    os.mkdir(f'd{i}'); open(f'd{i}/f', 'w').close(); os.chmod(f'd{i}/f', 0)\n"
        "    os.chmod(f'd{i}', m)\nos.chmod('.', 0)\ndef f(a, b): return 0",
    ),
    "S36 deep": Attack(
        "WA", "WA", "import os\nfor i in range(300):\n    os.mkdir('d' * 200); os.chdir('d' * 200)\nopen('x', 'w').close()\ndef f(a, b): return 0"
    ),
    "S36 names": Attack(
        "WA", "WA", "import os\nfor n in (b'\\xff\\xfe', b'\\n', b' ', b'-rf', b'x' * 255, '\\u202e'.encode(), b'*'):\n    os.mkdir(n); open(n + b'/' + n, 'w').close()\ndef f(a, b): return 0"
    ),
    "S36 moves the working folder": Attack(
        "WA", "WA", "import os\nos.mkdir('x'); os.chdir('x'); os.mkdir('y'); os.rename('y', '../z'); os.rmdir('../x')\ndef f(a, b): return 0"
    ),
    "S38 reward files": Attack(
        "WA",
        "WA",
        "for n in ('reward.txt', 'result.json', 'score', 'reward', '.forebay'):\n    open(n, 'w').write('inf')\ndef f(a, b): return float('inf')",
    ),
    "S38 nan": Attack("WA", "WA", _returns("", "float('nan')")),
    # ---- text that is none
    "S39 surrogate in an exception": Attack("RE", "RE", _raises("raise ValueError('\\ud800')")),
    "S39 surrogate returned": Attack("WA", "RE", _returns("", "'\\ud800'")),
    "S39 surrogate in a name": Attack("RE", "RE", _returns("", "globals()['\\udc80']")),
    "S39 surrogate in the source": Attack("CE", "CE", "def f(a, b): return '\ud800'"),
    "S40 NUL returned": Attack("WA", "WA", _returns("", "str(a + b) + '\\0'")),
    "S40 NUL in the source": Attack("CE", "CE", "def f(a, b): return a + b\nx = 1\0"),
    "S40 NUL in an exception": Attack("RE", "RE", _raises("raise ValueError('\\0')")),
    "S43 words for numbers": Attack("WA", "WA", _returns("", "{1: 'three', 40: '4_2'}.get(a, 'inf')")),
    "S44 huge int": Attack("WA RE", "WA RE OLE TLE", "def f(a, b): return 1 << 5_000_000", kinds=("inline", "remote", "call")),
    "S44 a million digits": Attack(
        "WA RE OLE", "WA", "def f(a, b): return '9' * 1_000_000", kinds=("inline", "call", "stdin"), limits={"output_kib": 1024}
    ),
    "S44 many nodes": Attack("RE TLE", "RE WA OLE", "def f(a, b): return [[]] * 300_000", kinds=("inline", "remote", "call")),
    "S44 colliding set": Attack(
        "WA RE TLE", "WA RE OLE", "def f(a, b): return {i * (2**61 - 1) for i in range(3000)}", kinds=("inline", "remote", "call")
    ),
    "S44 colliding dict": Attack(
        "WA RE TLE", "WA RE OLE", "def f(a, b): return {float(i * (2**61 - 1) * 2**40): 0 for i in range(3000)}", kinds=("inline", "remote", "call")
    ),
    "S44 large range": Attack("RE WA", "WA", "def f(a, b): return range(10**15)"),
    "S44 deep in the frame": Attack(
        "RE", "RE", "import os\ndef f(a, b):\n    m = b'[' * 10**6\n    os.write(3, len(m).to_bytes(4, 'big') + m)\n    os._exit(0)", kinds=("inline", "remote", "call")
    ),
    "S44 number in the frame": Attack(
        "RE", "RE", "import os\ndef f(a, b):\n    m = b'[\"value\",' + b'9' * 10**6 + b',null]'\n    os.write(3, len(m).to_bytes(4, 'big') + m)\n    os._exit(0)", kinds=("inline", "remote", "call")
    ),
    "S44 decimal": Attack("RE WA", "WA", "from decimal import Decimal\ndef f(a, b): return Decimal('1e999999')"),
    # ---- network and kernel
    "S46 socket": Attack("RE", "RE", "import socket\ndef f(a, b):\n    socket.socket()\n    return a + b"),
    "S46 abstract socket": Attack("RE", "RE", "import socket\ndef f(a, b):\n    socket.socket(socket.AF_UNIX).connect('\\0x')\n    return a + b"),
    "S46 name service": Attack("RE", "RE", "import socket\ndef f(a, b):\n    socket.getaddrinfo('localhost', 80, proto=6)\n    socket.create_connection(('127.0.0.1', 80))\n    return a + b"),
    "S46 urlopen": Attack("RE", "RE", "import urllib.request\ndef f(a, b):\n    urllib.request.urlopen('http://127.0.0.1:1/')\n    return a + b"),
    "S47 namespace": Attack(
        "WA", "WA", "import ctypes\nL = ctypes.CDLL(None)\ndef f(a, b): return a + b if L.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0 or L.unshare(0x10000000) == 0 else 0"
    ),
    # ---- state
    "S50 state for the next job": Attack(
        "WA RE",
        "WA",
        "import math, builtins, os, sys, signal\nmath.sqrt = len\nbuiltins.sum = lambda x: 3\nbuiltins.len = lambda x: 3\nos.environ['X'] = '1'\nos.putenv('X', '1')\n"
        "sys.modules['leak'] = math\nos.mkdir('sub'); open('sub/x', 'w').write('x')\nos.umask(0)\nsignal.signal(14, signal.SIG_IGN)\n"
        "signal.setitimer(0, 50)\nos.nice(5) if 0 else None\ndef f(a, b): return 0",
    ),
    "S53 the examples of the prompt": Attack("WA", "WA", "def f(a, b): return {(1, 2): 3, (40, 2): 42}.get((a, b))"),
    "S54 abort": Attack("RE", "RE", _raises("os.abort()")),
    "S54 segmentation fault": Attack("RE", "RE", "import ctypes\ndef f(a, b): ctypes.string_at(8)"),
    "S58 nothing": Attack("WA", "WA RE", "def f(a, b): pass"),
    "S58 no function": Attack("RE", "RE", "def g(a, b): return a + b"),
}  # fmt: skip
