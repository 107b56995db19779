"""The memory and the cost of training a Keras model on devices that need not be there."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import keras

import functrain as ft
from bridge import keras_private
from bridge.state._keras_state import require_compiled, variable_paths, variable_values
from bridge.train._steps import cached_step
from functrain.internal import require
from functrain.internal import tree as _tree

T = TypeVar("T")


def memory(
    model: keras.Model,
    batch: Any,
    *,
    fuse: int | None = None,
    target: ft.Target | None = None,
    sharding: Any = None,
) -> ft.inspect.Memory:
    """Returns the memory that `bridge.fit` of a compiled Keras model needs; nothing runs.

    Args:
      model: A compiled model.
      batch: A batch of full size as `fit` passes it to the model, such as ``(x, y)``: arrays or
        shapes (`jax.ShapeDtypeStruct`). For a model with several inputs, x is a dict, as
        ``model.input`` is. A model of keras_hub takes what its preprocessor returns.
      fuse: Steps per program; None for the number that ``fuse="auto"`` chooses.
      target: The devices to compile for, from `functrain.target`; by default this machine.
      sharding: The sharding of one batch, or a mesh; see `functrain.fit`.

    Returns:
      As `functrain.inspect.memory`: print it for a table that also says whether it fits. Leaves are
      named as the model's variables.

    Raises:
      TypeError: `model` is not a keras.Model, or a leaf of the batch is neither an array of numbers
        nor the shape of one.
      ValueError: The model is not compiled.

    Examples:
      >>> import bridge, functrain as ft, keras, numpy as np
      >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
      >>> model.compile("adam", "mse")
      >>> batch = np.ones((32, 8), "float32"), np.ones((32, 1), "float32")
      >>> bridge.memory(model, batch, target=ft.target()).fits
      True
    """
    # `fit` moves the values out of the variables, which keep no second copy.
    options = {"fuse": fuse, "target": target, "sharding": sharding, "donate": True}
    needed = _report(ft.inspect.memory, model, batch, **options)
    names = variable_paths(model)
    # Keras may give several variables one path.
    leaves: collections.Counter[str] = collections.Counter()
    for path, size in needed.leaves.items():
        name = f"{path.partition('/')[0]}/{names[path]}" if path in names else path
        leaves[name] += size
    return dataclasses.replace(needed, leaves=dict(leaves.most_common()))


def largest_batch(
    model: keras.Model,
    batch: Any,
    *,
    multiple_of: int | None = None,
    fuse: int | None = None,
    target: ft.Target | None = None,
    sharding: Any = None,
    verbose: bool = True,
) -> int:
    """Returns the largest batch size of a compiled Keras model whose training fits on a device.

    See `functrain.inspect.largest_batch`.

    Args:
      model: As for `memory`.
      batch: A batch of any size to begin with.
      multiple_of: Only multiples of this are tried; by default, 8 for each of the parts into which
        `sharding` divides the examples of a batch.
      fuse: As for `memory`.
      target: As for `memory`.
      sharding: As for `memory`.
      verbose: Print a line for each size.

    Returns:
      The number of examples; 0 if not even `multiple_of` fit.

    Raises:
      TypeError: As for `memory`.
      ValueError: The model is not compiled.

    Examples:
      >>> import bridge, functrain as ft, keras, numpy as np
      >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
      >>> model.compile("adam", "mse")
      >>> batch = np.ones((32, 8), "float32"), np.ones((32, 1), "float32")
      >>> bridge.largest_batch(model, batch, target=ft.target(), verbose=False) > 32
      True
    """
    options = {"multiple_of": multiple_of, "fuse": fuse, "target": target, "sharding": sharding}
    options |= {"verbose": verbose, "donate": True}
    return _report(ft.inspect.largest_batch, model, batch, **options)


def cost(
    model: keras.Model,
    batch: Any,
    *,
    fuse: int | None = None,
    target: ft.Target | None = None,
    sharding: Any = None,
) -> ft.inspect.Cost:
    """Returns the estimated cost of a training step of a compiled Keras model; nothing runs.

    Args:
      model: As for `memory`.
      batch: As for `memory`.
      fuse: As for `memory`.
      target: As for `memory`.
      sharding: As for `memory`.

    Returns:
      As `functrain.inspect.cost`: print it for tables of the time, kernels and layers of a step.

    Raises:
      jax.errors.JaxRuntimeError: The program is larger than the memory of the device.
      TypeError: As for `memory`.
      ValueError: The model is not compiled.

    Examples:
      >>> import bridge, keras, numpy as np
      >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
      >>> model.compile("adam", "mse")
      >>> batch = np.ones((32, 8), "float32"), np.ones((32, 1), "float32")
      >>> bridge.cost(model, batch, fuse=8).flops
      1024
    """
    options = {"fuse": fuse, "target": target, "sharding": sharding}
    return _report(ft.inspect.cost, model, batch, **options)


def _report(function: Callable[..., T], model: keras.Model, batch: Any, **options: Any) -> T:
    """Calls a function of `functrain.inspect` with a model's values and the step of `fit`."""
    require_compiled(model)
    expected = "arrays of numbers, or their shapes such as jax.ShapeDtypeStruct((32, 8), 'float32')"
    for path, leaf in _tree.leaves_with_path(batch):
        has_axes = _tree.is_array(leaf) and leaf.shape
        is_valid = has_axes and getattr(leaf.dtype, "kind", "f") not in "USO"
        advice = f"The leaf is at {path}. The batch is (x, y), as fit would make it."
        require(is_valid, "batch", expected, leaf, advice, error=TypeError)
    keras_private.trainer.build(model, batch)
    # The cached step keeps its programs, so that they are compiled once for all reports.
    return function(variable_values(model), cached_step(model, "train"), batch, **options)
