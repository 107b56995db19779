"""Reads the options of every example, and reports missing requirements in one line."""

import argparse
import importlib.util
import os
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
SCRIPT = pathlib.Path(sys.argv[0])
PACKAGES = {
    "functrain": "pip install .",
    "bridge": "pip install .",
    "matplotlib": "pip install matplotlib",
}


def arguments(
    prose: str, quick: str, packages: dict[str, str] | None = None, **defaults: object
) -> argparse.Namespace:
    """Parses the command line, selects the JAX backend of Keras, and creates the output folder.

    Args:
      prose: The script's docstring, which ``--help`` prints.
      quick: The help text of ``--quick``.
      packages: Further packages that the script needs: for each the command that installs it.
      **defaults: Further options: a default value, or a pair of a default value and a help text.

    Returns:
      The options, including `quick`, `seed`, `data` (the folder with the data sets) and `output`
      (the folder for pictures and files, which now exists).
    """
    parser = argparse.ArgumentParser(
        description=prose, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in {"seed": 0, **defaults}.items():
        value, help_text = default if isinstance(default, tuple) else (default, None)
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=type(value), default=value, help=help_text)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--output", type=pathlib.Path, help="folder to write to")
    args = parser.parse_args()
    for name in defaults:
        if isinstance(value := getattr(args, name), int) and value < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    name = f"{SCRIPT.stem}-quick" if args.quick else SCRIPT.stem
    args.output = args.output or FOLDER / "output" / name
    # These checks run before the script imports Keras or functrain, so that a missing package or a
    # wrong backend gives one line with the remedy instead of a traceback.
    _require_packages(PACKAGES)
    _require_jax()
    _require_writable(args.output)
    _require_packages(packages or {})
    args.data = FOLDER / "data"
    return args


def _require_packages(packages: dict[str, str]) -> None:
    """Exits with the pip command if a package is not installed."""
    for name, install_command in packages.items():
        if importlib.util.find_spec(name) is None:
            sys.exit(f"{SCRIPT.name} needs {name}: {install_command}")


def _require_jax() -> None:
    """Selects the JAX backend of Keras; exits if the environment selects another one."""
    backend = os.environ.setdefault("KERAS_BACKEND", "jax")
    if backend != "jax":
        sys.exit(
            f"{SCRIPT.name} needs Keras on JAX, and the environment has KERAS_BACKEND={backend}: "
            f"KERAS_BACKEND=jax python {SCRIPT}"
        )


def _require_writable(folder: pathlib.Path) -> None:
    """Creates the folder; exits if files cannot be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink(missing_ok=True)  # another process may have done it
    except OSError as error:
        reason = "a file is in the way" if isinstance(error, FileExistsError) else error.strerror
        sys.exit(
            f"{SCRIPT.name} cannot write to {folder} ({reason}): name another folder with --output"
        )
