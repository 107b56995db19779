"""Pictures and texts on a schedule."""

import dataclasses
import math
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._library import import_optional
from functrain.common._paths import PathArg, absolute_path
from functrain.common._types import PyTree
from functrain.engine._trigger import Every, Trigger, as_trigger
from functrain.loop._events import Event


@dataclasses.dataclass(eq=False)
class Sample:
    """A hook that makes pictures or texts from the state on a schedule, for you to look at.

    Loggers that come after it log them: `TensorBoard`, trackers such as `WandB`, and for texts
    `JSONLines`. With a directory, they are also written there, such as ``sample-00001200.png`` at
    step 1200.

    Args:
      make: A function of the state that returns a picture, a text, or a dict of them by name. A
        picture is an array `[H, W]` or `[H, W, C]` with C of 1 (grey), 3 (RGB) or 4 (RGBA), or a
        matplotlib Figure, best made without pyplot, which would keep it in memory. Several
        pictures of one size, `[N, H, W, C]`, become one with rows and columns. Values are uint8,
        bool, or floats from 0 (dark) to 1 (light); floats outside of this range are clipped, and
        NaN is dark. Divide floats from 0 to 255 by 255.
      every: A number of steps, or a trigger such as ``ft.every(seconds=60)``. The end of each epoch
        by default.
      directory: The directory for PNG and text files. Requires pillow.
      name: The name of a sample if `make` does not return a dict.

    Raises:
      ImportError: `directory` is given, and pillow is not installed.
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

    make: Callable[[PyTree], Any]
    _: dataclasses.KW_ONLY
    every: int | Trigger | None = None
    directory: PathArg | None = None
    name: str = "sample"

    def __post_init__(self) -> None:
        expected = "a function, state -> sample"
        require(callable(self.make), "make", expected, self.make, error=TypeError)
        self.every = as_trigger(self.every, Every(epochs=1))
        if self.directory is not None:
            # The process may change its working directory during the run.
            self._folder = absolute_path(self.directory, "directory")
            hint = "pictures in files need pillow: pip install 'functrain[pictures]'"
            self._pillow = import_optional("PIL.Image", hint)

    def __call__(self, event: Event, /) -> None:
        """Makes the samples."""
        result = self.make(event.state)
        samples = result if isinstance(result, dict) else {self.name: result}
        samples = {name: _to_sample(x, name) for name, x in samples.items()}
        event.samples |= samples
        # All processes call the hook, since `make` may compute on devices of all of them.
        if self.directory is not None and jax.process_index() == 0:
            for name, sample in samples.items():
                self._save(sample, self._folder / f"{name}-{event.step:08d}")

    def _save(self, sample: np.ndarray | str, stem: pathlib.Path) -> None:
        # A name may have folders, such as "train/digits".
        stem.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(sample, str):
            pathlib.Path(f"{stem}.txt").write_text(sample, encoding="utf-8")
        else:
            # Pillow expects grayscale pictures without an axis of channels.
            picture = sample[..., 0] if sample.shape[-1] == 1 else sample
            self._pillow.fromarray(picture).save(f"{stem}.png")


def _to_sample(x: Any, name: str) -> np.ndarray | str:
    """Returns a text unchanged, and one or several pictures as `u8[H, W, C]`."""
    if isinstance(x, str):
        return x
    if hasattr(x, "savefig"):
        x = _draw(x)
    picture: np.ndarray[Any, Any] = np.asarray(x) if _tree.is_array(x) else np.empty(())
    if picture.ndim == 2:
        picture = picture[..., None]
    has_shape = picture.ndim in (3, 4) and picture.shape[-1] in (1, 3, 4) and picture.size > 0
    # Other integers have no known range: clipped to 1, pictures from 0 to 255 would be white.
    has_dtype = picture.dtype in (np.uint8, np.bool_) or jnp.issubdtype(picture.dtype, jnp.floating)
    expected = (
        f"a text, a matplotlib Figure, or pictures [(N,) H, W(, C)] for {name!r}, C of 1, 3 or 4, "
        "of uint8, bool, or floats from 0 to 1"
    )
    require(has_shape and has_dtype, "make", expected, x, error=TypeError)
    # Generated pictures may leave the range, and NaN cannot be converted to bytes.
    if picture.dtype != np.uint8:
        picture = (np.clip(np.nan_to_num(picture), 0.0, 1.0) * 255).round().astype(np.uint8)
    return _arrange_in_grid(picture) if picture.ndim == 4 else picture


def _draw(figure: Any) -> np.ndarray:
    """Returns a matplotlib Figure as a picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas: Any = FigureCanvasAgg(figure)  # some of its methods have no types
    canvas.draw()
    return np.array(canvas.buffer_rgba())


def _arrange_in_grid(pictures: np.ndarray) -> np.ndarray:
    """Returns `[N, H, W, C]` as one picture, with about as many rows as columns."""
    n, height, width, channels = pictures.shape
    columns = math.isqrt(n - 1) + 1
    rows = -(-n // columns)
    # Cells without a picture stay black.
    cells = np.pad(pictures, [(0, rows * columns - n), (0, 0), (0, 0), (0, 0)])
    by_rows = cells.reshape(rows, columns, height, width, channels).swapaxes(1, 2)
    return by_rows.reshape(rows * height, columns * width, channels)
