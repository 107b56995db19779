"""Values as JSON lines."""

import json
import math
import os
from collections.abc import Sequence
from typing import Any

from functrain.hooks._logger import Line, Logger
from functrain.hooks._text_file import TextFile


class JSONLines(TextFile, Logger):
    """A hook that writes a JSON object a line: what steps report, and what hooks and epochs add.

    ``{"step": 20, "epoch": 0, "loss": 0.5}`` is a step, with what hooks before this one have added
    to it, texts of a `Sample` included; ``{"step": 50, "epoch": 0, "epoch/loss": 0.6,
    "epoch/val_loss": 0.7}`` an epoch. The numbers of a step are those of that very step. They come
    one program late, so that nobody waits. ``pandas.read_json(path, lines=True)`` reads them.

    A run that a `functrain.Checkpointer` resumes goes on without a line too many or missing.

    Args:
      path: The file. Missing folders are made.
      steps: Write what every so many steps report; 1 for every step.
      append: Whether to go on below what the file holds; else it is replaced.

    Raises:
      ValueError: `steps` is no whole number from 1 on.
      OSError: (when a run begins) the file cannot be written.

    A number that is not finite is written as null: JSON has no other way.

    Examples:
      >>> import pathlib, tempfile
      >>> from functrain import EpochEnd, Position
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     log = JSONLines(f"{folder}/log.jsonl")
      ...     log(EpochEnd(position=Position(step=10), state=(), values={"loss": 0.5}))
      ...     log.close()
      ...     print(pathlib.Path(f"{folder}/log.jsonl").read_text().rstrip())
      {"step": 10, "epoch": 0, "epoch/loss": 0.5}
    """

    def __init__(
        self, path: str | os.PathLike[str], *, steps: int = 10, append: bool = False
    ) -> None:
        TextFile.__init__(self, path, append)
        Logger.__init__(self, steps, path=str(self.path), append=append)

    def write(self, lines: Sequence[Line]) -> None:
        """Writes lines."""
        self._add("".join(f"{_object(line)}\n" for line in lines))


def _object(line: Line) -> str:
    texts = {name: x for name, x in line.samples.items() if isinstance(x, str)}
    parts: dict[str, Any] = {"step": line.step, "epoch": line.epoch, **line.values, **texts}
    try:
        return json.dumps(parts, allow_nan=False)
    except ValueError:
        return json.dumps({name: _finite(x) for name, x in parts.items()})


def _finite(x: float | str) -> float | str | None:
    return x if isinstance(x, str) or math.isfinite(x) else None
