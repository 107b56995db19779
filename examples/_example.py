"""What every example does first: its arguments, and one line where something is missing."""

import argparse
import importlib.util
import os
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
SCRIPT = pathlib.Path(sys.argv[0])


def arguments(prose: str, quick: str, **defaults: object) -> argparse.Namespace:
    """Reads the command line, sees to Keras's backend, and makes the folder for the pictures.

    Args:
      prose: The script's docstring, for ``--help``.
      quick: What ``--quick`` does.
      **defaults: Further options with their defaults; a pair is (default, help).

    Returns:
      The options, with `quick`, `seed`, `data` (the folder) and `output` (the folder, made).
    """
    parser = argparse.ArgumentParser(
        description=prose, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in {"seed": 0, **defaults}.items():
        value, says = default if isinstance(default, tuple) else (default, None)
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=type(value), default=value, help=says)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--output", type=pathlib.Path, help="folder to write to")
    args = parser.parse_args()
    for name in defaults:
        if isinstance(value := getattr(args, name), int) and value < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, got {value}")
    args.output = args.output or FOLDER / "output" / (SCRIPT.stem + "-quick" * args.quick)
    _require_packages()
    _require_jax()
    _require_writable(args.output)
    args.data = FOLDER / "data"
    return args


def _require_packages() -> None:
    for name, line in (
        ("functrain", "pip install ."),
        ("bridge", "pip install ."),
        ("matplotlib", "pip install matplotlib"),
    ):
        if importlib.util.find_spec(name) is None:
            sys.exit(f"{SCRIPT.name} needs {name}: {line}")


def _require_jax() -> None:
    backend = os.environ.setdefault("KERAS_BACKEND", "jax")
    if backend != "jax":
        sys.exit(
            f"{SCRIPT.name} needs Keras on JAX, and the environment has KERAS_BACKEND={backend}: "
            f"KERAS_BACKEND=jax python {SCRIPT}"
        )


def _require_writable(folder: pathlib.Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / ".writable"
        trial.touch()
        trial.unlink()
    except OSError as error:
        taken = "a file is in the way" if isinstance(error, FileExistsError) else error.strerror
        sys.exit(
            f"{SCRIPT.name} cannot write to {folder} ({taken}): name another folder with --output"
        )
