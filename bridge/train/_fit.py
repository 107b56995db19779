"""fit, evaluate and predict: drop-ins for the methods of a Keras model."""

import contextlib
import warnings
from typing import Any

import jax
import keras

from bridge import keras_private
from bridge.state._distribution import require_use
from bridge.state._keras_state import require_compiled
from bridge.train import _checks
from bridge.train._batches import keras_batches
from bridge.train._callbacks import files_of_the_first
from bridge.train._hook import Evaluation, KerasHook
from bridge.train._loggers import with_loggers
from bridge.train._memory import Memory
from bridge.train._runs import Options, run_evaluate, run_fit, run_predict
from bridge.train._steps import noted
from functrain import Checkpointer
from functrain.internal import (
    Batches,
    DeferredSignals,
    FuseArg,
    Mode,
    Saving,
    argument_advice,
    require_integer,
)


@argument_advice(
    "",
    eval_data="Pass validation_data=(x, y), as in Keras.",
    hooks="Pass callbacks=[...], those of Keras.",
    metrics="They belong to the model: model.compile(optimizer, loss, metrics=[...]).",
    optimizer="It belongs to the model: model.compile(optimizer, loss).",
    steps="It is steps_per_epoch=, as in Keras.",
)
def fit(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: Any = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: Any = 1,
    *,
    fuse: FuseArg = "auto",
    rewrites: Mode = "auto",
    checkpointer: Checkpointer | None = None,
) -> Any:
    """Trains as ``model.fit(x, y, ...)`` does, many steps in one program.

    Every step is the model's own `train_step`, so that all of Keras comes along; with
    ``rewrites="exact"`` the results are those of `model.fit`, to the bit.

    What Keras compiles is compiled. So are models that it leaves uncompiled because of layers that
    another backend could not compile, such as RandomRotation, if nothing can come of it but speed:
    every layer is one of Keras's own that is known to draw by keras.random only, the steps are
    Keras's, and neither ``compile(run_eagerly=True)`` nor ``rewrites="exact"`` says otherwise. (On
    JAX, Keras treats ``run_eagerly=True`` as ``jit_compile=False``; of such a model it does not
    keep whether the latter was asked for.) To compile one with layers of yours:
    ``layer.supports_jit = True`` for those that say False, and `compile` again.

    A callback of yours that overrides a train-batch method (`on_train_batch_end`, ...) makes
    "auto" take one step at a time, as does TerminateOnNaN, which may end at any. Say
    ``chunk_safe = True`` in its class, or pass a number to `fuse`, and it is called for every batch
    with that batch's logs, when the chunk is over; what it changes (weights, learning rate,
    `stop_training`) then holds from the next chunk on: with a number, TerminateOnNaN leaves the
    weights of its chunk's end. If several processes fit and only some of them set `stop_training`,
    all stop together, a few programs later. The loop
    is this function's: overrides of `fit`, `evaluate`, `predict` or `make_train_function` in the
    model's class have no part in it; overrides of steps, losses and metrics have.

    Args:
      model: A compiled model.
      x: As for `model.fit`, as is everything up to `validation_freq`.
      y: Targets.
      batch_size: Examples per step; 32 where the data do not say.
      epochs: Number of the epoch to stop before.
      verbose: "auto", 0, 1 or 2.
      callbacks: Keras callbacks. Loggers of functrain, such as `functrain.hooks.TensorBoard`, are
        taken as well.
      validation_split: Share of the arrays to evaluate on.
      validation_data: What to evaluate on.
      shuffle: Whether to shuffle arrays before each epoch; or "batch".
      class_weight: Weights by class.
      sample_weight: Weights by example.
      initial_epoch: Number of the first epoch.
      steps_per_epoch: Steps per epoch, where the data do not say.
      validation_steps: Steps per evaluation.
      validation_batch_size: Examples per step of an evaluation.
      validation_freq: How many epochs from one evaluation to the next, or which epochs have one.
      fuse: Steps per program. "auto" takes `model.steps_per_execution` where that is above 1,
        else at most 128, by the sizes of batches and state. Results do not depend on it.
      rewrites: Which slow operations to rewrite on CPU; see `functrain.fuse`.
      checkpointer: A `functrain.Checkpointer`. The fit goes on from its last checkpoint, if there
        is one, in mid-epoch too, as if it had never ended: variables, seeds, metrics, history,
        NumPy's and Python's global randomness, and what Keras's callbacks remember are brought
        back; callbacks of yours, too, if they have `state()` and `restore(state)`. It saves itself
        whenever that is due, at its end, on Ctrl-C, and on SIGTERM, after which the process ends
        with 143. Exact for arrays; other data are begun anew, and what was taken is left out.

    Returns:
      `model.history`. The weights, optimizer and metrics are in the model, as they are however it
      ends: by an error, by a callback or by Ctrl-C.

    Raises:
      TypeError: `model` is no Keras model, or a callback neither one of Keras's nor a logger.
      ValueError: What `model.fit` raises; an argument is out of its range; arrays in
        `validation_data` cannot be evaluated; a layer has ``stateful=True``; or the model prepares
        samples in a `fit` of its own, as tasks of keras_hub do.

    Examples:
      >>> import keras, numpy as np
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
      >>> model.compile("adam", "mse", metrics=["mae"])
      >>> data = np.ones((64, 3), np.float32), np.ones((64, 4), np.float32)
      >>> sorted(fit(model, *data, epochs=2, verbose=0).history)
      ['loss', 'mae']
    """
    _checks.require_model(model)
    require_compiled(model)
    sizes = {"batch_size": batch_size, "validation_batch_size": validation_batch_size}
    steps = {"steps_per_epoch": steps_per_epoch, "validation_steps": validation_steps}
    callbacks, loggers = with_loggers(callbacks)
    _checks.require_arguments(x, y, fuse, rewrites, verbose, callbacks, **sizes, **steps)
    require_integer("epochs", epochs, 0)
    require_integer("initial_epoch", initial_epoch, 0)
    _checks.require_validation_arguments(validation_split, validation_freq)
    epochs = _capped(epochs)
    data = x, y, sample_weight
    if validation_split and validation_data is None:
        data, validation_data = keras_private.data.split_validation(data, validation_split)
    more = {"shuffle": shuffle, "class_weight": class_weight}
    batches = keras_batches(model, data, batch_size, steps_per_epoch, trains=True, **more)
    with noted(model, data):
        keras_private.trainer.build_from(model, batches.data)
    evaluation: Evaluation | None = None
    if validation_data is not None:
        size = validation_batch_size or batch_size
        _checks.require_validation(model, validation_data, data, size, validation_steps)
        evaluation = Evaluation(model, validation_data, size, validation_steps, validation_freq)
    _checks.require_rate(model, callbacks)
    require_use()
    _checks.require_together(model, callbacks)
    with contextlib.ExitStack() as stack:
        stack.enter_context(files_of_the_first(callbacks))
        for logger in loggers:
            stack.callback(logger.close)
        callbacks = _callback_list(model, callbacks, verbose, epochs, batches, add_history=True)
        saving: Saving | None = None
        memory: Memory | None = None
        if checkpointer is not None:
            _checks.require_no_other_backup(callbacks)
            memory = Memory(model, callbacks)
        hook = KerasHook(model, "train", batches, callbacks, memory=memory)
        if checkpointer is not None:
            how_to_evaluate = "validation_data= or validation_split="
            saving = Saving(checkpointer, batches, {"keras": hook}, how_to_evaluate)
        signals = DeferredSignals(terminate="handled" if saving is None else "none")
        stack.enter_context(signals)
        return run_fit(
            hook,
            Options(fuse, rewrites),
            signals,
            epochs=epochs,
            initial_epoch=initial_epoch,
            saving=saving,
            evaluation=evaluation,
            quiet=verbose == 0 or jax.process_index() > 0,
        )


def evaluate(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
    *,
    fuse: FuseArg = "auto",
    rewrites: Mode = "auto",
) -> Any:
    """Evaluates as ``model.evaluate(x, y, ...)`` does, many steps in one program.

    Args:
      model: A compiled model.
      x: As for `model.evaluate`, as is everything up to `return_dict`.
      y: Targets.
      batch_size: Examples per step.
      verbose: "auto", 0, 1 or 2.
      sample_weight: Weights by example.
      steps: Steps to take, where the data do not say.
      callbacks: Keras callbacks.
      return_dict: Whether to return a dict.
      fuse: As for `fit`.
      rewrites: As for `fit`.

    Returns:
      What `model.evaluate` returns: the metrics, as a list, a scalar or a dict.

    Raises:
      ValueError: What `model.evaluate` raises.

    Examples:
      >>> import keras, numpy as np
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
      >>> model.compile("adam", "mse")
      >>> x, y = np.zeros((64, 3), np.float32), np.ones((64, 4), np.float32)
      >>> evaluate(model, x, y, verbose=0, return_dict=True)
      {'loss': 1.0}
    """
    _checks.require_model(model)
    require_compiled(model)
    numbers = {"batch_size": batch_size, "steps": steps}
    _checks.require_arguments(x, y, fuse, rewrites, verbose, callbacks, **numbers)
    data = x, y, sample_weight
    batches = keras_batches(model, data, batch_size, steps, trains=False)
    with noted(model, data):
        keras_private.trainer.build_from(model, batches.data)
    callbacks = _callback_list(model, callbacks, verbose, 1, batches)
    with DeferredSignals() as signals:
        hook = KerasHook(model, "test", batches, callbacks)
        logs = run_evaluate(hook, Options(fuse, rewrites), signals.handle_pending)
        signals.handle_pending()
    return logs if return_dict else keras_private.trainer.metrics_in_order(model, logs)


def predict(
    model: keras.Model,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
    *,
    fuse: FuseArg = "auto",
    rewrites: Mode = "auto",
) -> Any:
    """Predicts as ``model.predict(x, ...)`` does, many steps in one program.

    Args:
      model: A model, compiled or not.
      x: As for `model.predict`, as is everything up to `callbacks`.
      batch_size: Examples per step.
      verbose: "auto", 0, 1 or 2.
      steps: Steps to take, where the data do not say.
      callbacks: Keras callbacks.
      fuse: As for `fit`.
      rewrites: As for `fit`.

    Returns:
      What `model.predict` returns: NumPy arrays in the structure of the model's outputs.

    Raises:
      ValueError: What `model.predict` raises.

    Examples:
      >>> import keras, numpy as np
      >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
      >>> predict(model, np.ones((40, 3), np.float32), verbose=0).shape
      (40, 4)
    """
    _checks.require_model(model)
    numbers = {"batch_size": batch_size, "steps": steps}
    _checks.require_arguments(x, None, fuse, rewrites, verbose, callbacks, **numbers)
    batches = keras_batches(model, (x, None, None), batch_size, steps, trains=False)
    if not all(layer.built for layer in keras_private.layers.all_layers(model)):
        _build_by_a_call(model, batches.data)
    callbacks = _callback_list(model, callbacks, verbose, 1, batches)
    with DeferredSignals() as signals:
        hook = KerasHook(model, "predict", batches, callbacks)
        return run_predict(hook, Options(fuse, rewrites), signals)


def _build_by_a_call(model: keras.Model, epochs: Any) -> None:
    _, _, items = next(iter(epochs))
    x, _, _ = keras.utils.unpack_x_y_sample_weight(next(items).arrays())
    with DeferredSignals(), keras.StatelessScope():
        model(x)
    epochs.reset()


def _callback_list(
    model: keras.Model,
    callbacks: Any,
    verbose: Any,
    epochs: int,
    batches: Batches,
    add_history: bool = False,
) -> Any:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(
        callbacks,
        add_history=add_history,
        add_progbar=verbose != 0 and jax.process_index() == 0,
        verbose=verbose,
        epochs=epochs,
        steps=batches.steps,
        model=model,
    )


def _capped(epochs: int) -> int:
    """Returns the number of epochs that `keras.config.set_max_epochs` allows."""
    most = keras.config.max_epochs()
    if most and most < epochs:
        warnings.warn(f"Limiting epochs to {most}", stacklevel=3)
        return int(most)
    return epochs
