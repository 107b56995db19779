"""Connection of this process to the others, if there are others."""

import atexit
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax

from functrain.common._checks import require
from functrain.distributed._coordination import do_not_wait_at_exit
from functrain.distributed._stopping import leave_all_runs

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    **more: Any,
) -> None:
    """Connects this process to the others. Alone, or when connected already, it does nothing.

    Call it first, before anything is computed. The same script runs in one process and in many. It
    is `jax.distributed.initialize`, with four additions:

    - It reads JAX_NUM_PROCESSES and JAX_PROCESS_ID, which Kubeflow and ``python -m
      functrain.launch`` set beside JAX_COORDINATOR_ADDRESS. JAX still detects Slurm, Open MPI, GKE
      and TPU pods.
    - If nothing configures other processes, the process runs alone.
    - On one machine, at a loopback address, the coordinator listens only to that address. JAX would
      listen to all addresses of the machine.
    - A process that an uncaught exception ends does not wait for the others, so that
      ``functrain.launch`` or the manager of a cluster can end them. JAX would wait for five
      minutes.

    Args:
      coordinator_address: Address of the first process, such as ``"10.0.0.1:1234"``.
      num_processes: The number of processes.
      process_id: The number of this process, from 0 on.
      **more: Other arguments of `jax.distributed.initialize`: local_device_ids,
        cluster_detection_method, heartbeat_timeout_seconds, ...

    Raises:
      ValueError: Some of the three are known and others are not.
      RuntimeError: From JAX: something was computed before.

    If not all processes connect within ``initialization_timeout=`` seconds, 300 by default, JAX
    aborts this one. A message that names the address and the process is printed before.

    Examples:
      >>> import contextlib, jax
      >>> with contextlib.suppress(RuntimeError):  # too late in this example
      ...     initialize()
      >>> jax.process_count()
      1
    """
    if jax.distributed.is_initialized():
        return
    config: dict[str, Any] = {
        "coordinator_address": coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "num_processes": _or_environment(num_processes, "JAX_NUM_PROCESSES"),
        "process_id": _or_environment(process_id, "JAX_PROCESS_ID"),
    }
    if address := config["coordinator_address"]:
        host, _, port = address.rpartition(":")
        require(port.isdecimal(), "coordinator_address", "host:port", address)
        # Otherwise JAX would listen to all addresses of the machine.
        if host in _LOOPBACK:
            more = {"coordinator_bind_address": address, **more}
    # JAX aborts the process from C++, where no exception can be caught, so the message comes first.
    timeout = more.get("initialization_timeout", 300)
    message = (
        f"functrain: not all processes have connected; this one has {config}, and JAX aborts it "
        f"after {timeout:g} s. Is process 0 running, is its port open, and has each process the "
        "same address and number of processes, and its own process_id?"
    )
    timer = threading.Timer(0.9 * timeout, print, [message], {"file": sys.stderr, "flush": True})
    timer.start()
    try:
        jax.distributed.initialize(**config, **more)
    except ValueError as error:
        # JAX says that an argument "must be defined" if it could not detect it. If nothing
        # configures other processes, this one runs alone.
        if "defined" not in str(error) or set(config.values()) != {None}:
            raise
    else:
        sys.excepthook = _exit_after(sys.excepthook)
        atexit.register(leave_all_runs)
    finally:
        timer.cancel()


def _exit_after(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an excepthook that calls another one, and exits without waiting for the others."""

    def print_and_exit(kind: type[BaseException], *more: Any) -> None:
        hook(kind, *more)
        if hasattr(sys, "ps1"):  # an error at a prompt does not end the session
            return
        do_not_wait_at_exit()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        # JAX's client would wait for the others when the interpreter deletes it.
        os._exit(130 if issubclass(kind, KeyboardInterrupt) else 1)

    return print_and_exit


def _or_environment(number: int | None, name: str) -> int | None:
    text = os.environ.get(name)
    return int(text) if number is None and text else number
