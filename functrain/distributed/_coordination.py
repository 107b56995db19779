"""Key-value store of JAX's coordination service, for small messages."""

# Nothing here runs a program on a device, so any thread may call it at any time.

from typing import Any

from functrain.distributed._jax_private import global_state


def is_available() -> bool:
    """Returns True if there are several processes, connected by a coordination service."""
    return global_state().client is not None and process_count() > 1


# `jax.process_index()` and `jax.process_count()` would start JAX's backends.
def process_id() -> int:
    """Returns the number of this process, from 0 on."""
    return int(global_state().process_id)


def process_count() -> int:
    """Returns the number of processes."""
    return int(global_state().num_processes)


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


def _client() -> Any:
    client = global_state().client
    if client is None:  # TPU hosts can form one JAX job without the service
        raise RuntimeError(
            "expected processes that are connected by JAX's coordination service, got none. Call "
            "functrain.distributed.initialize() at the start of the script."
        )
    return client
