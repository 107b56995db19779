"""Notes: small texts that the processes of a job leave for each other, beside their programs."""

from functrain.distributed._jax_private import coordination


def are_possible() -> bool:
    """Returns True if there are other processes, and a coordination service between them."""
    return coordination().client is not None and bool(coordination().num_processes > 1)


def own_number() -> int:
    """Returns the number of this process, without starting JAX's backends."""
    return int(coordination().process_id)


def processes() -> int:
    """Returns how many processes there are, without starting JAX's backends."""
    return int(coordination().num_processes)


def leave(path: str, text: object) -> None:
    """Leaves a note; raises a RuntimeError if there is one of that path, or no service any more."""
    coordination().client.key_value_set(path, str(text))


def read(folder: str) -> dict[str, str]:
    """Returns the notes in a folder by name; raises a RuntimeError if the service is gone."""
    notes = coordination().client.key_value_dir_get(f"{folder}/")
    return {path.removeprefix(f"{folder}/"): text for path, text in notes}


def remove(folder: str) -> None:
    """Removes the notes in a folder."""
    coordination().client.key_value_delete(f"{folder}/")
