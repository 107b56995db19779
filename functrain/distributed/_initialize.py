"""Connects this process with the others, if there are others."""

import os
import socket
import sys
import threading
import time
from typing import Any

import jax

from functrain.distributed._ending import end_soon_after_a_failure
from functrain.distributed._stopping import leave_runs


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    **more: Any,
) -> None:
    """Connects this process with the others; alone, or connected already, it does nothing.

    Call it first, before anything is computed; the same script runs on one process and on many.
    It is `jax.distributed.initialize`, with what that lacks:

    - JAX_NUM_PROCESSES and JAX_PROCESS_ID are read, as Kubeflow and ``python -m functrain.launch``
      set them beside JAX_COORDINATOR_ADDRESS. What JAX itself detects it goes on detecting:
      Slurm, Open MPI, GKE, TPU pods.
    - Where nothing says that there are others, there are none.
    - On one machine, at a loopback address, the coordinator listens to that address alone; by
      itself JAX listens to all that reach the machine.
    - If an exception or ``sys.exit(3)`` ends one process, all end within seconds, with the same
      exit status: by itself JAX waits five minutes for the others, which wait for this one.
      Functions registered with `atexit` are called as ever, for up to five seconds.

    Args:
      coordinator_address: Of the first process, such as ``"10.0.0.1:1234"``.
      num_processes: How many there are.
      process_id: Which this is, from 0 on.
      **more: As `jax.distributed.initialize` has it: local_device_ids, cluster_detection_method,
        heartbeat_timeout_seconds, ...

    Raises:
      ValueError: Some of the three are known and others are not.
      TimeoutError: Nobody answers at the address, within ``initialization_timeout=`` seconds, 300
        by default. Where the first process answers and others do not come, JAX ends the process;
        what it was is printed before.
      RuntimeError: From JAX: something was computed before.

    Examples:
      >>> import contextlib, jax
      >>> with contextlib.suppress(RuntimeError):  # too late here: something was computed
      ...     initialize()
      >>> jax.process_count()
      1
    """
    if jax.distributed.is_initialized():
        return
    address = coordinator_address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    count = _from_environment("JAX_NUM_PROCESSES") if num_processes is None else num_processes
    number = _from_environment("JAX_PROCESS_ID") if process_id is None else process_id
    if address is not None and address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]"):
        more = {"coordinator_bind_address": address, **more}
    timer = None
    if not (address is None or count is None or number is None):  # else JAX detects or refuses them
        timer = _checked(address, count, number, more.get("initialization_timeout", 300))
    try:
        jax.distributed.initialize(address, count, number, **more)
    except ValueError as error:
        given = {"coordinator_address": address, "num_processes": count, "process_id": number}
        if "defined" not in str(error):  # JAX knows enough, and refuses it
            raise
        if set(given.values()) != {None}:
            raise ValueError(
                "initialize: expected coordinator_address, num_processes and process_id, or a "
                f"cluster that JAX detects, got {given}. Set JAX_COORDINATOR_ADDRESS, "
                "JAX_NUM_PROCESSES and JAX_PROCESS_ID, or pass all three."
            ) from error
    else:
        end_soon_after_a_failure(before=leave_runs)
    finally:
        if timer is not None:
            timer.cancel()


def _checked(address: str, count: int, number: int, seconds: float) -> threading.Timer:
    """Checks all three, waits for the first process, and returns a timer that names it if late.

    By itself JAX would end the process without a name or an address.
    """
    if not 0 <= number < count:
        raise ValueError(
            f"process_id: expected a number from 0 to {count - 1}, since num_processes is {count}, "
            f"got {number}"
        )
    if not address.rpartition(":")[2].isdecimal():
        raise ValueError(f"coordinator_address: expected host:port, got {address!r}")
    name = f"process {number} of {count}, coordinator {address}"
    if number:
        seconds -= _wait_for_answer(address, seconds, name)
    timer = threading.Timer(0.9 * seconds, _say_who_is_missing, [name, seconds])
    timer.daemon = True
    timer.start()
    return timer


def _wait_for_answer(address: str, seconds: float, name: str) -> float:
    """Waits until a process answers at an address; returns for how long."""
    host, _, port = address.rpartition(":")
    began = time.monotonic()
    while True:
        left = seconds - (time.monotonic() - began)
        try:
            with socket.create_connection((host.strip("[]"), int(port)), max(left, 0.1)):
                return time.monotonic() - began
        except OSError as error:
            if left <= 0:
                raise TimeoutError(
                    f"initialize: {name}: expected an answer within {seconds:g} s, got {error}. Is "
                    "process 0 started, is that its host, and is the port open from here? "
                    "initialization_timeout= waits for longer."
                ) from error
            time.sleep(min(0.2, left))


def _say_who_is_missing(name: str, seconds: float) -> None:
    print(
        f"functrain: {name}: not all processes came; JAX ends this one after {seconds:.0f} s. "
        "Expected as many as that, all with the same address and number of processes, and each "
        "with its own number.",
        file=sys.stderr,
        flush=True,
    )


def _from_environment(name: str) -> int | None:
    text = os.environ.get(name, "").strip()
    if text and not text.isdecimal():
        raise ValueError(f"{name}: expected a whole number, got {text!r}")
    return int(text) if text else None
