"""Which arguments fit, evaluate and predict refuse."""

import warnings
import weakref
from typing import Any

import keras
import numpy as np

from bridge import keras_private
from bridge.optim import OptaxOptimizer
from bridge.state._keras_state import KerasState
from functrain import FitResult, Model, TrainState
from functrain.internal import (
    is_whole,
    mode,
    refuse_mask,
    refuse_numbers,
    require_fuse,
    require_untraced,
)

_warned: weakref.WeakSet[type] = weakref.WeakSet()


def require_model(model: Any) -> None:
    """Refuses what is no Keras model, or prepares its data in loops of its own.

    Raises:
      TypeError: It is no Keras model.
      ValueError: It has a preprocessor, as tasks of keras_hub do.
    """
    if not keras_private.trainer.is_trainer(model):
        raise TypeError(
            f"model: expected a keras.Model, got {type(model).__name__}{_instead_of(model)}"
        )
    _refuse_preprocessor(model)
    _warn_of_overrides(model)


def _instead_of(model: Any) -> str:
    if isinstance(model, Model):
        return (
            ", a pair of functions. Pass the Keras model that it was made of; or train the pair by "
            "functrain.fit(state, step, data)."
        )
    if isinstance(model, TrainState | KerasState | FitResult):
        state = "result.state" if isinstance(model, FitResult) else "state"
        return (
            f". Pass the Keras model, into which bridge.to_keras({state}, model) writes it; or go "
            f"on from it by functrain.fit({state}, step, data)."
        )
    return "."


def _refuse_preprocessor(model: Any) -> None:
    """Refuses models that prepare samples in their own fit, evaluate and predict.

    As keras_hub.models.Task does, by `preprocess_samples`. Its data pipelines are those of grain
    or tf.data, with an order of their own: doing as they do is theirs.
    """
    prepares = callable(getattr(model, "preprocess_samples", None))
    if prepares and getattr(model, "preprocessor", model) is not None:
        raise ValueError(
            f"model: expected one that takes its data as they are, got {type(model).__name__}, "
            "whose own fit, evaluate and predict prepare them by model.preprocess_samples. "
            "Prepare all data first, those for validation too, and switch that off:\n"
            "    data = model.preprocess_samples(x, y)\n"
            "    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)\n"
            "    model.preprocessor = None\n"
            "    bridge.fit(model, x, y)"
        )


def _warn_of_overrides(model: keras.Model) -> None:
    """Says once for a class that its own loops are not run."""
    cls = type(model)
    methods = ("fit", "evaluate", "predict", "make_train_function", "make_test_function")
    found = [name for name in methods if getattr(cls, name) is not getattr(keras.Model, name, None)]
    if found and isinstance(model, keras.Model) and cls not in _warned:
        _warned.add(cls)
        warnings.warn(
            f"{cls.__name__} overrides {', '.join(found)}, which bridge.fit, evaluate and predict "
            "do not call: the loop is theirs. Overrides of train_step, test_step, compute_loss and "
            "the like are called. To run your own loop, call the model's method.",
            stacklevel=4,
        )


def require_no_other_backup(callbacks: Any) -> None:
    """Refuses to save a fit that Keras's own callback saves, too: only one can be gone on from."""
    for callback in getattr(callbacks, "callbacks", []):
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "callbacks: expected no BackupAndRestore beside checkpointer=, got one. Both bring "
                "back where a fit was: leave it out."
            )


def require_rate(model: keras.Model, callbacks: Any) -> None:
    """Refuses callbacks that want the one rate of an optimizer which has none to show or to set.

    Keras finds out at the end of the first epoch, or later.

    Raises:
      ValueError: As said.
    """
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)  # of a loss scale's
    if not isinstance(optimizer, OptaxOptimizer):
        return
    for callback in keras.tree.flatten(getattr(callbacks, "callbacks", callbacks)):
        sets = isinstance(callback, _SET_RATES)
        if not sets and not isinstance(callback, keras.callbacks.TensorBoard):
            continue
        name = type(callback).__name__
        try:
            _ = optimizer.learning_rate
        except AttributeError as error:
            raise ValueError(
                f"callbacks: {name} asks the optimizer for its learning rate. {error} Or leave "
                f"{name} out. No step was taken."
            ) from error
        if sets and optimizer.follows_schedule:
            raise ValueError(
                f"callbacks: expected an optimizer with one learning rate for {name} to set, got "
                "one that follows a schedule. Pass a number, bridge.OptaxOptimizer(optax.adam, "
                f"learning_rate=1e-3), or leave {name} out. No step was taken."
            )


_SET_RATES = (keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler)


def require_arguments(
    x: Any, y: Any, fuse: Any, rewrites: Any, verbose: Any, callbacks: Any, **numbers: Any
) -> None:
    """Refuses what none of fit, evaluate and predict takes.

    Args:
      x: The data.
      y: Their labels, or None.
      fuse: Steps per program.
      rewrites: Which operations to rewrite.
      verbose: How to show the progress.
      callbacks: Those of Keras.
      **numbers: None or whole numbers from 1 on, by the names of the arguments.
    """
    require_fuse(fuse)
    mode(rewrites)
    require_untraced("x and y", (x, y))
    if not isinstance(verbose, str | int) or verbose not in ("auto", 0, 1, 2):
        raise ValueError(f"verbose: expected 'auto', 0, 1 or 2, got {verbose!r}")
    if x is None:
        raise ValueError(
            "x: expected arrays, a dataset, a loader or a generator, got None. A generator of "
            "batches goes into x, and yields (inputs, targets)."
        )
    for name, data in (("x", x), ("y", y)):
        if isinstance(data, list | tuple | dict):
            refuse_numbers(data, name)  # Keras does too, with all the numbers in its message
        for leaf in keras.tree.flatten(data):
            refuse_mask(leaf, name)
    refuse_texts(x=x, y=y)
    require_whole(1, optional=True, **numbers)
    _require_callbacks(callbacks)


def refuse_texts(**data: Any) -> None:
    """Raises TypeError where arrays hold texts, by the names of the arguments."""
    for name, tree in data.items():
        for x in keras.tree.flatten(tree):
            kind = getattr(getattr(x, "dtype", None), "kind", "")
            if kind not in {"O", "S", "U"}:
                continue
            rows = x if np.ndim(x) else np.reshape(x, 1)
            few = np.asarray(rows[:1])
            if few.size and isinstance(few.flat[0], str | bytes):
                how = (
                    "Number the classes first: classes, y = np.unique(y, return_inverse=True), or "
                    "map them with keras.layers.StringLookup."
                    if name.endswith("y")
                    else "Give each text numbers first, such as the ids of its tokens."
                )
                text = few.reshape(-1).tolist()[0]
                raise TypeError(
                    f"{name}: expected numbers, got {len(rows):,} texts, such as {text!r}. {how}"
                )


def require_whole(least: int, *, optional: bool = False, **numbers: Any) -> None:
    """Refuses what is no whole number, by the names of the arguments."""
    for name, value in numbers.items():
        if not is_whole(value, least) and not (optional and value is None):
            raise ValueError(
                f"{name}: expected {'None or ' * optional}a whole number of at least {least}, "
                f"got {value!r}"
            )


def require_validation_arguments(split: Any, freq: Any) -> None:
    """Refuses a share that is none, and what says no epochs."""
    number = isinstance(split, int | float) and not isinstance(split, bool)
    if split is not None and not (number and 0 <= split < 1):
        raise ValueError(
            f"validation_split: expected a share of the arrays, from 0 to below 1, got {split!r}"
        )
    if not isinstance(freq, list) and not (isinstance(freq, int) and freq >= 1):
        raise ValueError(
            "validation_freq: expected a whole number of epochs of at least 1, or a list of "
            f"epochs, got {freq!r}"
        )


def _require_callbacks(callbacks: Any) -> None:
    """Refuses what is no callback of Keras's kind.

    Raises:
      TypeError: One is a class, not an object of it, or a hook of functrain.
    """
    for callback in keras.tree.flatten(callbacks):
        if isinstance(callback, type) and issubclass(callback, keras.callbacks.Callback):
            raise TypeError(
                f"callbacks: expected callbacks, got the class {callback.__name__}. Pass one made "
                f"of it: {callback.__name__}(...)."
            )
        if callback is not None and not hasattr(callback, "on_epoch_end"):
            raise TypeError(
                f"callbacks: expected those of Keras, got {callback!r}. Hooks of functrain go into "
                "functrain.fit(hooks=), but for its loggers (TensorBoard, JSONLines, WandB), which "
                "bridge.fit takes as well."
            )
