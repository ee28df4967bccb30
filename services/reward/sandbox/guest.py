"""What runs inside the sandbox's forked processes: programs, the server of a candidate's functions, the runner of tests, compilers.

Loaded by path in a worker; standard library only, and imported when it is needed. Nothing here is trusted on the candidate's side: the
candidate shares its process with this code and can answer with any bytes. It never holds an expected value, so that is all it can do.

Descriptors: 0 standard input, 1 and 2 output, 3 the channel to the judge (frames of 4 bytes of length and a body), 4 a compiled program
for those that run one. A role returns its exit code.
"""

from __future__ import annotations

import _signal
import os
import sys

CHANNEL, PROGRAM = 3, 4
EXIT_FAILED = 70  # this code failed, not the candidate's
EXIT_MEMORY = 97  # the program ended by a MemoryError that it did not catch
_MAX_FRAME = 8 << 20
values = sys.modules.get(
    "forebay_values"
)  # loaded by workers that serve functions; not by those for programs without imports


def read_frame() -> bytes:
    """The next frame's body. The judge going away ends this process."""
    size = int.from_bytes(_exactly(4), "big")
    if size > _MAX_FRAME:
        os._exit(EXIT_FAILED)
    return _exactly(size)


def _exactly(count: int) -> bytes:
    parts = []
    while count:
        part = os.read(CHANNEL, min(count, 1 << 20))
        if not part:
            os._exit(0)
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def write_frame(body: bytes) -> None:
    """Send one frame."""
    data = memoryview(len(body).to_bytes(4, "big") + body)
    while data:
        data = data[os.write(CHANNEL, data) :]


def parts(body: bytes) -> list[bytes]:
    """A list of byte strings, each 4 bytes of length and the bytes: the form of frames that carry programs."""
    found, at = [], 0
    while at < len(body):
        size = int.from_bytes(body[at : at + 4], "big")
        found.append(body[at + 4 : at + 4 + size])
        at += 4 + size
    return found


# ---- Python: source or code object in, a loaded module out ----


def _compile(frame: list[bytes]) -> object:
    """The code object of ``[b"source", TEXT]`` or ``[b"code", MARSHALLED]``; tells the judge ``c`` (with the code object, if it is asked
    for by ``b"keep"``) or ``e`` with the error, and then ends."""
    form, data, keep = frame
    if form == b"code":  # made by _compile in a guest like this one, before any candidate's code ran there
        import marshal

        return marshal.loads(data)
    try:
        code = compile(data.decode("utf-8", "surrogatepass"), "main.py", "exec", dont_inherit=True)
    except BaseException as error:  # whatever the compiler says is the verdict
        write_frame(b"e" + _describe(error).encode("utf-8", "backslashreplace"))
        os._exit(0)
    if keep == b"keep":
        import marshal

        write_frame(b"c" + marshal.dumps(code))
    else:
        write_frame(b"c")
    return code


def _describe(error: BaseException) -> str:
    name = type(error).__name__
    if isinstance(error, SyntaxError) and error.lineno:
        return f"{name}: {error.msg} (line {error.lineno})"[:300]
    try:
        return f"{name}: {error}"[:300]
    except BaseException:  # the text of a candidate's exception is the candidate's code
        return name


def _seed() -> None:
    random = sys.modules.get("random")
    if random is not None:
        random.seed(0)


# ---- a whole program on standard input and output ----


def run_program() -> int:
    """Compile, leave the channel, run as ``__main__``: its exit code, by the rules of an interpreter."""
    code = _compile(parts(read_frame()))
    os.close(CHANNEL)
    _seed()
    main = type(sys)("__main__")
    main.__dict__["__file__"] = "main.py"
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    sys.argv[:] = ["main.py"]
    status = _outcome(lambda: exec(code, main.__dict__))  # this is what a sandbox is for
    threading = sys.modules.get("threading")
    if threading is not None:
        status = _outcome(threading._shutdown) or status
    atexit = sys.modules.get("atexit")
    if atexit is not None:
        atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except BaseException:  # as an interpreter does when it can't flush
        return 120
    return status


def _outcome(action: object) -> int:
    try:
        action()
    except SystemExit as stop:
        if stop.code is None:
            return 0
        if isinstance(stop.code, int):
            return stop.code & 0xFF
        print(stop.code, file=sys.stderr)
        return 1
    except MemoryError:
        return EXIT_MEMORY
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


# ---- a program in another language ----


def run_native() -> int:
    """``[argument count, arguments..., name, content, ...]``: write the files into the box, then become the program. An empty first
    argument is the compiled program on descriptor 4."""
    frame = parts(read_frame())
    count = int(frame[0])
    arguments, files = frame[1 : 1 + count], frame[1 + count :]
    for name, content in zip(files[::2], files[1::2], strict=True):
        with open(name, "wb") as file:
            file.write(content)
    environment = {"PATH": "/usr/bin:/bin", "HOME": os.getcwd(), "TMPDIR": os.getcwd(), "LANG": "C.UTF-8", "TZ": "UTC"}
    environment["OPENSSL_CONF"] = "/dev/null"  # node would otherwise look for one in /etc
    target = PROGRAM if not arguments[0] else arguments[0]
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # Python ignores these, and a program would inherit that
        _signal.signal(number, _signal.SIG_DFL)
    os.execve(target, [arguments[0] or b"main", *arguments[1:]], environment)
    return EXIT_FAILED


# ---- the candidate's functions, called by the judge ----


def serve_functions() -> int:
    """Compile, load, then answer calls until there is an empty one, or until killed."""
    code = _compile(parts(read_frame()))
    _seed()
    module = type(sys)("solution")  # not __main__: a guard must not run for call tests
    sys.modules["solution"] = module
    try:
        exec(code, module.__dict__)
    except BaseException as error:  # SystemExit too; the tests did not pass, whatever it was
        write_frame(values.dumps(["raised", *values.describe(error)]))
        return 0
    write_frame(values.dumps(["loaded"]))
    handles: list = []
    encoder = values.Encoder(handles)
    decoder = values.Decoder(lambda number, _name: handles[number])
    while call := read_frame():
        write_frame(_answer(values.unpack(call), module.__dict__, handles, encoder, decoder))
    return 0


def _answer(call, scope, handles, encoder, decoder) -> bytes:
    _, target, args_tree, kwargs_tree, options = call
    try:
        function = getattr(handles[target[0]], target[1]) if isinstance(target, list) else _find(scope, target)
        args = decoder.decode(args_tree)
        result = function(*args, **decoder.decode(kwargs_tree))
        if "await" in options and hasattr(result, "__await__"):
            import asyncio

            result = asyncio.run(_awaited(result))
        tree = encoder.encode(result)
        return values.dumps(["value", tree, _changed(args, args_tree, encoder) if "args" in options else None])
    except BaseException as error:  # SystemExit and the like fail the test; the judge decides
        return values.dumps(["raised", *values.describe(error)])


async def _awaited(coroutine: object) -> object:
    return await coroutine


def _find(scope: dict, name: str) -> object:
    """A function of the module, or a method of a new instance: of the class named before the dot, else of ``Solution``."""
    owner, _, method = name.rpartition(".")
    if not owner:
        if name in scope:
            return scope[name]
        if hasattr(scope.get("Solution"), name):
            owner, method = "Solution", name
        else:
            raise NameError(f"name {name!r} is not defined")
    if owner not in scope and owner == "Solution" and method in scope:
        return scope[method]
    if owner not in scope:
        raise NameError(f"class {owner!r} is not defined")
    return getattr(scope[owner](), method)


def _changed(args, before, encoder) -> object:
    try:
        after = encoder.encode(args)
    except values.ValueRefused:
        return None
    return None if after == before else after


# ---- the tests' process: no candidate code here ----


class _TestError(Exception):
    """The tests ask for something the border can't carry: the suite's fault, not the candidate's."""


class Remote:
    """A function of the candidate, or a method of an object there, as the tests see it."""

    def __init__(self, target) -> None:
        self._target = target

    def __call__(self, *args, **kwargs):
        try:
            encoder = values.Encoder()
            frame = values.dumps(["call", self._target, encoder.encode(args), encoder.encode(kwargs), ["args"]])
        except values.ValueRefused as error:
            raise _TestError(str(error)) from None
        write_frame(frame)
        try:
            value, changed = values.read_reply(read_frame(), values.Decoder(RemoteObject))
        except values.CandidateRaised as raised:
            error = _as_builtin(raised)
            error.forebay_raised = str(raised)
            raise error from None
        if changed is not None:
            for mine, theirs in zip(args, changed, strict=False):
                _copy_back(mine, theirs)
        return value


class RemoteObject(values.Opaque if values else object):
    """An object that stays with the candidate; only its methods can be called."""

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return Remote([self.number, name])


def _as_builtin(raised) -> BaseException:
    try:
        error = raised.builtin(str(raised))
    except TypeError:  # UnicodeDecodeError and the like want more arguments
        error = ValueError(str(raised)) if issubclass(raised.builtin, ValueError) else Exception(str(raised))
    return error if isinstance(error, Exception) else RuntimeError(str(raised))


def _copy_back(mine, theirs) -> None:
    if type(mine) is not type(theirs):
        return
    if isinstance(mine, list | bytearray):
        mine[:] = theirs
    elif isinstance(mine, dict | set):
        mine.clear()
        mine.update(theirs)


def run_tests() -> int:
    """Run the instrumented tests; send ``["call", ...]``, ``["test", kind, text]`` and at last ``["done", kind, text]``."""
    job = values.unpack(read_frame())
    _seed()
    remotes = {name: Remote(name) for name in job["names"]}
    scope = {
        "__name__": "tests",
        **remotes,
        "__forebay_ok__": lambda: write_frame(values.dumps(["test", "ok", ""])),
        "__forebay_fail__": lambda error, text: write_frame(values.dumps(["test", *_kind(error, text)])),
    }
    try:
        exec(compile(job["source"], "<tests>", "exec"), scope)  # the tests, in a sandbox of their own
        if job["kind"] == "check":
            scope["check"](remotes[job["entry_point"]])
    except BaseException as error:  # classified and reported; the judge decides
        write_frame(values.dumps(["done", *_kind(error)]))
    else:
        write_frame(values.dumps(["done", "ok", ""]))
    return 0


def _kind(error: BaseException, text: str = "") -> tuple[str, str]:
    raised = getattr(error, "forebay_raised", None)
    if raised is not None:
        return "raised", raised
    if isinstance(error, values.ValueRefused):
        return "refused", str(error)
    if isinstance(error, _TestError | NameError | ImportError | MemoryError | RecursionError):
        return "suite", f"{type(error).__name__}: {error}"[:300]
    said = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
    return "wrong", f"{text}: {said}"[:300] if text and said else text or said[:300]


# ---- static measures of a program's text ----


def measure_readability() -> int:
    """The source's metrics; nothing of it is run."""
    source = read_frame().decode("utf-8", "surrogatepass")
    measured = sys.modules["forebay_readability"].measure(source)
    write_frame(values.dumps(["measured", values.Encoder().encode(measured)]))
    return 0


ROLES = {
    "program": run_program,
    "native": run_native,
    "compile": run_native,
    "functions": serve_functions,
    "tests": run_tests,
    "readability": measure_readability,
}
