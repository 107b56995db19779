"""Connects this process with the others, if there are others."""

import os
from typing import Any

import jax

from functrain.distributed._ending import end_at_once_after_an_error


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
    - A process that an exception ends is gone at once: by itself JAX waits five minutes for the
      others, who wait for it.

    Args:
      coordinator_address: Of the first process, such as ``"10.0.0.1:1234"``.
      num_processes: How many there are.
      process_id: Which this is, from 0 on.
      **more: As `jax.distributed.initialize` has it: local_device_ids, cluster_detection_method,
        heartbeat_timeout_seconds, ...

    Raises:
      ValueError: Some of the three are known and others are not.
      RuntimeError: From JAX: something was computed before, or the others were not found.

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
    count = _whole("JAX_NUM_PROCESSES") if num_processes is None else num_processes
    own = _whole("JAX_PROCESS_ID") if process_id is None else process_id
    if address is not None and address.rpartition(":")[0] in ("127.0.0.1", "localhost", "[::1]"):
        more = {"coordinator_bind_address": address, **more}
    try:
        jax.distributed.initialize(address, count, own, **more)
    except ValueError as error:
        known = {"coordinator_address": address, "num_processes": count, "process_id": own}
        if "defined" not in str(error):  # JAX knows enough, and refuses it
            raise
        if set(known.values()) != {None}:
            raise ValueError(
                "initialize: expected coordinator_address, num_processes and process_id, or a "
                f"cluster that JAX detects, got {known}. Set JAX_COORDINATOR_ADDRESS, "
                "JAX_NUM_PROCESSES and JAX_PROCESS_ID, or pass all three."
            ) from error
    else:
        end_at_once_after_an_error()


def _whole(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None or not text.strip():
        return None
    if not text.strip().isdecimal():
        raise ValueError(f"{name}: expected a whole number, got {text!r}")
    return int(text)
