"""Starts Python programs in processes that have imported JAX, Keras, functrain and bridge already.

`run` and `Popen` take what their namesakes in `subprocess` take, for commands that begin with
`sys.executable`. A program saves the four seconds of processor time that these imports need: a
server process imports them, initializes no JAX backend, and is forked for each program. The program
still has its own environment, folder, arguments, files, signals and exit status, and it ends as any
Python program does.

Use `subprocess` where the imports themselves are tested, the interpreter and its options, or the
memory of a process.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import types
import warnings
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
IMPORTED = ("jax", "keras", "bridge", "functrain", "functrain.checkpoint")
WIDTH = 16  # bytes of each number that is sent

# Variables that are read before a program begins, and those of these names that are not.
READ_BEFORE = ("JAX_", "KERAS_", "MPL", "PYTHON")
READ_LATER = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "PYTHONPATH")

# --- in the tests --------------------------------------------------------------------------------


processor_seconds: list[float] = []  # those of each process that has ended


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, with a process that the server forks.

    The methods that begin a process and wait for its end are private to `subprocess`, and the same
    in Python 3.11 to 3.14. Pipes, text, timeouts and signals are what they are there.
    """

    def _execute_child(  # type: ignore[no-untyped-def, override]
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
        creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_,
    ) -> None:  # fmt: skip
        python, *arguments = [os.fspath(argument) for argument in args]
        env = dict(os.environ if env is None else env)
        if python != sys.executable or _settings(env) != _settings(dict(os.environ)):
            raise ValueError(f"expected sys.executable and {READ_BEFORE} as they are in the tests")
        self._connection, theirs = socket.socketpair()
        files = [0, 1, 2]
        for number, pipe in enumerate((p2cread, c2pwrite, errwrite)):
            files[number] = pipe if pipe != -1 else number
        socket.send_fds(_server(os.getpid()), [b"."], [theirs.fileno(), *files])
        theirs.close()
        request = {"arguments": arguments, "cwd": os.fspath(cwd or os.getcwd()), "env": env}
        self._connection.sendall(json.dumps(request).encode())
        self._connection.shutdown(socket.SHUT_WR)
        self.pid = int(self._connection.recv(WIDTH))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                status, seconds = self._connection.recv(2 * WIDTH).split()
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self._connection.close()
            self.returncode = int(status)
            processor_seconds.append(float(seconds))
        return self.returncode

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        try:
            return self._wait(0)
        except subprocess.TimeoutExpired:
            return None


def run(
    command: Any,
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run`, with a process that the server forks."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:  # as subprocess.run does
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def _settings(env: dict[str, str]) -> dict[str, str]:
    """Returns the variables that the interpreter and the imports read, for the server to have."""
    named = {name: value for name, value in env.items() if name.startswith(READ_BEFORE)}
    return {name: value for name, value in named.items() if name not in READ_LATER}


@functools.cache
def _server(owner: int) -> socket.socket:
    """Starts the server of this process, and returns the connection to it; they end together."""
    ours, theirs = socket.socketpair()
    server = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.PIPE,  # not the terminal, of which Python would make other streams
        stdout=subprocess.PIPE,
    )
    theirs.close()

    @atexit.register
    def end() -> None:
        ours.close()
        server.communicate()

    return ours


# --- in the server and the processes that are forked from it -------------------------------------


def _serve(requests: socket.socket) -> tuple[socket.socket, list[int]]:
    """Forks a process for each request, and returns in it, with the connection and its files.

    Between the server and the process is another one, which waits for its end and reports it.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those between
    while True:
        message, descriptors, *_ = socket.recv_fds(requests, 1, 4)
        if not message:
            os._exit(0)  # the tests have ended
        number, *files = descriptors
        connection = socket.socket(fileno=number)
        if _fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if (process := _fork()) == 0:
                return connection, files
            _report(connection, files, process)
        connection.close()
        for file in files:
            os.close(file)


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads: those of OpenBLAS, which can be forked
        return os.fork()


def _report(connection: socket.socket, files: list[int], process: int) -> None:
    for file in (0, 1, 2, *files):
        os.close(file)  # whoever reads from the process sees its end
    connection.sendall(f"{process:{WIDTH}}".encode())
    _, status, used = os.wait4(process, 0)
    seconds = used.ru_utime + used.ru_stime
    ended = f"{os.waitstatus_to_exitcode(status):{WIDTH}}{seconds:{WIDTH}.3f}"
    connection.sendall(ended.encode())
    os._exit(0)


def _become(connection: socket.socket, files: list[int]) -> list[str]:
    """Makes this process what was asked for, and returns the arguments of its program."""
    with connection, connection.makefile() as lines:
        request = json.loads(lines.read())
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(request["env"])
    here = [path for path in sys.path[1:] if path not in before]
    after = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:] = [*filter(None, after), *here]
    sys.modules["numpy"].random.seed()  # not that of the server
    return request["arguments"]  # type: ignore[no-any-return]


def _run(arguments: list[str]) -> None:
    """Runs a program as `python` followed by these arguments does."""
    kind = arguments[0]
    if kind == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), vars(main))
    elif kind == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif kind.startswith("-"):
        raise ValueError(f"expected a program, -c or -m, got {kind}; options need a subprocess")
    else:
        sys.argv, sys.path[0] = arguments, str(pathlib.Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the programs
    sys.path[0] = str(ROOT)  # not that of this file, where `bridge` is a folder of tests
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # a process that collects its garbage would copy all of it
    program = _become(*_serve(socket.socket(fileno=int(sys.argv[1]))))
    signal.signal(signal.SIGINT, interrupt)
    _run(program)
