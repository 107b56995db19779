"""Private names of JAX that functrain uses because JAX has no public ones (jax 0.12.0).

`jax._src.distributed.global_state` has the client of the coordination service, through which
processes exchange small texts without a program on their devices. Orbax takes it from there, too.
`jax._src.api.clean_up` is the function that makes a process wait for all others at its exit.
"""

import atexit
from typing import Any

from jax._src import api, distributed


def global_state() -> Any:
    """Returns JAX's state: `client` (None without a service), `process_id`, `num_processes`."""
    return distributed.global_state


def do_not_wait_at_exit() -> None:
    """Keeps JAX from waiting for the other processes when this one exits."""
    atexit.unregister(api.clean_up)
