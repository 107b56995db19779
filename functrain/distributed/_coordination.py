"""Key-value store of JAX's coordination service, for small messages.

It uses private names of JAX, which has no public ones for this (jax 0.12.0): the client of the
service in `jax._src.distributed.global_state`, which Orbax takes from there, too, and the function
`jax._src.api.clean_up`, which makes a process wait for all others at its exit.
"""

# Nothing here runs a program on a device, so any thread may call it at any time.

import atexit
from typing import Any

import jax
from jax._src import api, distributed


def is_available() -> bool:
    """Returns True if there are several processes, connected by a coordination service."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def put(key: str, text: object) -> None:
    """Stores a text; raises RuntimeError if the key is taken, or the service has ended."""
    _client().key_value_set(key, str(text))


def read(folder: str) -> dict[str, str]:
    """Returns the texts in a folder by name; raises RuntimeError if the service has ended."""
    entries = _client().key_value_dir_get(f"{folder}/")
    return {key.removeprefix(f"{folder}/"): text for key, text in entries}


def remove(folder: str) -> None:
    """Removes all texts in a folder."""
    _client().key_value_delete(f"{folder}/")


def wait_for(key: str, seconds: float) -> str | None:
    """Waits for a text, and returns it; None after a number of seconds."""
    try:
        return str(_client().blocking_key_value_get(key, int(1000 * seconds)))
    except RuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def do_not_wait_at_exit() -> None:
    """Keeps JAX from waiting for the other processes when this one exits."""
    atexit.unregister(api.clean_up)


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:  # TPU hosts can form one JAX job without the service
        raise RuntimeError(
            "expected processes that are connected by JAX's coordination service, got none. Call "
            "functrain.distributed.initialize() at the start of the script."
        )
    return client
