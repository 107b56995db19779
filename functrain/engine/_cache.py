"""The on-disk cache of compiled programs, which spares the next process their compilation."""

import os

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from functrain.common._library import import_optional
from functrain.common._paths import path_text


def enable_compilation_cache(directory: str | os.PathLike[str]) -> None:
    """Keeps compiled programs in a directory and loads them from there next time.

    Switches on jax's persistent compilation cache for this process, for programs of any size and
    compile time. Results do not change. Entries are never removed: delete the directory to free
    the space. On some processors jaxlib 0.10 prints long lines about ``+prefer-no-gather`` and
    ``+prefer-no-scatter`` when it loads a program. They are harmless, and TF_CPP_MIN_LOG_LEVEL=3 in
    the environment hides them if it is set before Python starts.

    Args:
      directory: Created if it is missing; or a URL such as ``gs://bucket/programs``, for which jax
        needs etils. Share it between runs, but not between machines of different kinds.

    Raises:
      ImportError: `directory` is a URL, and etils is not installed.

    Examples:
      >>> import functrain as ft
      >>> ft.enable_compilation_cache("/tmp/programs")  # doctest: +SKIP
    """
    directory = path_text(directory, "directory")
    if "://" in directory:
        # Without this library, jax would make a local folder named "gs:".
        to_install = "jax needs etils for URLs: pip install 'etils[epath,epath-gcs]'"
        import_optional("etils.epath", to_install)
    else:
        directory = os.path.abspath(directory)
        os.makedirs(directory, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", directory)
    # By default jax caches only programs that took a second to compile, which leaves out those of
    # small models.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    # -1 rather than 0, which lets jax set a limit for the file system of the cache.
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # jax opens the directory once, at its first program, and does not tell which one is open: the
    # config may have named another one since. After a reset it opens the one that is named now.
    reset_cache()
