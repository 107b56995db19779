"""The on-disk cache of compiled programs, which spares the next process their compilation."""

import os

import jax


def enable_compilation_cache(directory: str | os.PathLike[str]) -> None:
    """Keeps compiled programs in a directory and loads them from there next time.

    Switches on jax's persistent compilation cache for this process, for programs of any size and
    compile time. Results do not change. Entries are never removed: delete the directory to free
    the space.

    Args:
      directory: Created if it is missing. Share it between runs, but not between machines of
        different kinds.

    Examples:
      >>> import functrain as ft
      >>> ft.enable_compilation_cache("/tmp/programs")  # doctest: +SKIP
    """
    directory = os.path.abspath(directory)
    os.makedirs(directory, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", directory)
    # By default jax caches only programs that took a second to compile, which leaves out those of
    # small models.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # -1 rather than 0, which lets jax set a limit for the file system of the cache.
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
