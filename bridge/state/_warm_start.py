"""A part of a state out of a file that Keras wrote."""

import os
from collections.abc import Callable, Sequence

import keras

import functrain
from bridge.model._file_names import file_names
from bridge.model._from_keras import require_built
from functrain import WarmStart
from functrain.internal import PyTree


def warm_start(
    state: PyTree,
    source: str | os.PathLike[str],
    model: keras.Model,
    *,
    take: str | Sequence[str] | None = None,
    skip: str | Sequence[str] = (),
    rename: Callable[[str], str] | None = None,
    cast: bool = False,
) -> WarmStart:
    """Takes leaves of a state out of a `.keras` or `.weights.h5` file; all others stay.

    As `functrain.warm_start`, with the names of Keras (``layers/dense_1/vars/0``) as those that
    states have (``params/head/kernel``). Of a `.keras` file the weights alone are read: no layer is
    built of what it says, and no Lambda runs.

    Args:
      state: From `create_state`; or anything with such paths.
      source: The file.
      model: A built model of the architecture in the file, or of one that differs in what is not
        taken, such as the width of the head. Its values play no part, and stay.
      take: As for `functrain.warm_start`.
      skip: As there.
      rename: Given a variable's path in `model`, such as ``params/body/kernel``, returns that in
        the state, where `model` is only a part of the one the state is of.
      cast: As there.

    Returns:
      WarmStart(state, taken, left, missing, kept, source).

    Raises:
      TypeError: `model` is no keras.Model.
      ValueError: `model` is not built; and what `functrain.warm_start` raises.

    Examples:
      >>> import bridge, keras, optax, tempfile
      >>> def build(classes):
      ...     body, head = keras.layers.Dense(8, name="body"), keras.layers.Dense(classes)
      ...     return keras.Sequential([keras.Input((3,)), body, head])
      >>> model = build(2)
      >>> state = bridge.create_state(model, optax.adam(1e-3))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     build(10).save(f"{folder}/old.keras")
      ...     warm = warm_start(state, f"{folder}/old.keras", model, skip="params/dense/**")
      >>> warm.taken
      {'params/body/bias': 'layers/dense/vars/1', 'params/body/kernel': 'layers/dense/vars/0'}
    """
    if not isinstance(model, keras.Model):
        raise TypeError(f"model: expected a keras.Model, got {type(model).__name__}")
    require_built(model)
    names = file_names(model)

    def renamed(name: str) -> str:
        path = names.get(name, name)
        return path if rename is None or name not in names else rename(path)

    return functrain.warm_start(state, source, take=take, skip=skip, rename=renamed, cast=cast)
