"""Compiled programs on disk, so that the next process need not compile them."""

import os

import jax


def enable_compilation_cache(directory: str | os.PathLike[str]) -> None:
    """Keeps compiled programs in a directory and takes them from there next time.

    Switches on jax's persistent compilation cache for this process, for programs of any size and
    compile time. Results are the same. Entries are never removed; delete the directory to.

    Args:
      directory: Made if missing. Share it between runs, not between kinds of machines.

    Examples:
      >>> import functrain as ft
      >>> ft.enable_compilation_cache("/tmp/programs")  # doctest: +SKIP
    """
    directory = os.path.abspath(directory)
    os.makedirs(directory, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
