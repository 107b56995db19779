"""Pictures and texts on a schedule."""

import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from functrain.common import _repr, _tree
from functrain.common._library import import_optional
from functrain.common._types import PyTree
from functrain.engine._trigger import Every, Trigger, as_trigger
from functrain.loop._events import Event


class Sample:
    """A hook that makes pictures or texts of the state now and then, to be looked at.

    Loggers that come after it take them along: `TensorBoard` and `WandB`, of texts `JSONLines` too.
    With a directory they are written there as well: ``sample-00001200.png`` at step 1200.

    Args:
      make: A function of the state that returns a picture, a text, or a dict of them by name. A
        picture is `[H, W]` or `[H, W, C]` with C of 1, 3 or 4; several of one size, `[N, H, W, C]`,
        are laid out as one. Bytes are taken as they are, floats from 0 (dark) to 1.
      every: A number of steps, or a trigger such as ``ft.every(seconds=60)``. The end of each epoch
        by default.
      directory: Where to write PNG and text files; needs pillow.
      name: Of what comes without one.

    Attributes:
      latest: What was made last, by name: `u8[H, W, C]` or a text.

    Raises:
      ImportError: There is a directory, and pillow is not installed.
      TypeError: (when called) `make` returned something else.

    Examples:
      >>> import jax.numpy as jnp
      >>> from functrain import Position
      >>> from functrain.events import EpochEnd
      >>> hook = Sample(lambda state: state["w"])
      >>> event = EpochEnd(position=Position(step=10), state={"w": jnp.eye(2)})
      >>> hook(event)
      >>> event.samples["sample"][..., 0].tolist()
      [[255, 0], [0, 255]]
    """

    def __init__(
        self,
        make: Callable[[PyTree], Any],
        *,
        every: int | Trigger | None = None,
        directory: str | os.PathLike[str] | None = None,
        name: str = "sample",
    ) -> None:
        self.make = make
        self.every = as_trigger(every, Every(epochs=1))
        self.directory = None if directory is None else pathlib.Path(directory)
        self.name = name
        self.latest: dict[str, np.ndarray | str] = {}
        if directory is not None:
            _pillow()

    def __repr__(self) -> str:
        return _repr.call(self, make=self.make, every=self.every)

    def __call__(self, event: Event, /) -> None:
        """Makes them."""
        made = self.make(event.state)
        named = made if isinstance(made, dict) else {self.name: made}
        self.latest = {name: _sample(x, name) for name, x in named.items()}
        event.samples |= self.latest
        if self.directory is not None and jax.process_index() == 0:
            for name, sample in self.latest.items():
                _save(sample, self.directory / f"{name}-{event.step:08d}")


def _sample(x: Any, name: str) -> np.ndarray | str:
    """Returns a text as it is, pictures as one: u8[H, W, C]."""
    if isinstance(x, str):
        return x
    picture: np.ndarray[Any, Any] = np.asarray(x) if _tree.is_array(x) else np.empty(())
    if picture.ndim == 2:
        picture = picture[..., None]
    if picture.ndim not in (3, 4) or picture.shape[-1] not in (1, 3, 4):
        raise TypeError(
            f"make: expected a picture [H, W] or [H, W, C], several [N, H, W, C], with C of 1, 3 "
            f"or 4, or a text, got {_tree.spec(x)} for {name!r}."
        )
    if picture.dtype != np.uint8:
        picture = (np.clip(np.nan_to_num(picture), 0.0, 1.0) * 255).round().astype(np.uint8)
    return _laid_out(picture) if picture.ndim == 4 else picture


def _laid_out(pictures: np.ndarray) -> np.ndarray:
    """Lays out `[N, H, W, C]` row by row, about as many rows as columns."""
    n, height, width, channels = pictures.shape
    columns = max(1, int(np.ceil(np.sqrt(n))))
    rows = -(-n // columns)
    sheet = np.zeros((rows * columns, height, width, channels), np.uint8)
    sheet[:n] = pictures
    by_rows = sheet.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
    return by_rows.reshape(rows * height, columns * width, channels)


def _save(sample: np.ndarray | str, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(sample, str):
        path.with_suffix(".txt").write_text(sample, encoding="utf-8")
    else:
        picture = sample[..., 0] if sample.shape[-1] == 1 else sample  # pillow's form of grey
        _pillow().fromarray(picture).save(path.with_suffix(".png"))


def _pillow() -> Any:
    """Returns what writes pictures."""
    return import_optional(
        "PIL.Image", "pictures in files need pillow: pip install 'functrain[pictures]'"
    )
