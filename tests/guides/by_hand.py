"""Training by hand, as guides teach it: Keras's stateless methods in a jitted step and a loop.

Nothing here uses functrain or the bridge: it is what they are compared with.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import keras
import numpy as np
import optax

MNIST = pathlib.Path(__file__).parents[2] / "examples" / "data" / "mnist.npz"
Arrays = tuple[np.ndarray, np.ndarray]


def digits(n: int, *, one_hot: bool = False) -> Arrays:
    """The first digits as `f32[n, 784]` in 0 to 1, with classes `i32[n]` or `f32[n, 10]`."""
    with np.load(MNIST) as file:
        x = file["x_train"][:n].reshape(-1, 784).astype(np.float32) / 255
        y = file["y_train"][:n].astype(np.int32)
    return x, np.eye(10, dtype=np.float32)[y] if one_hot else y


def mlp(*between: keras.Layer, inputs: int = 784, outputs: int = 10) -> keras.Model:
    """784-64-64-10, the network of the guides; always with the same values."""
    keras.utils.set_random_seed(0)
    first, second = keras.layers.Dense(64, "relu"), keras.layers.Dense(64, "relu")
    last = keras.layers.Dense(outputs)
    return keras.Sequential([keras.Input((inputs,)), first, *between, second, last])


class Tensor:
    """Stands in for a tensor of another library: it has a `numpy` method and nothing else."""

    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def numpy(self) -> np.ndarray:
        return self._values


class Dataset:
    """Stands in for a tf.data dataset: batches of such tensors, any number of times."""

    def __init__(self, arrays: Arrays, batch_size: int) -> None:
        self._arrays, self._batch_size = arrays, batch_size

    def __iter__(self) -> Any:
        for i in range(0, len(self._arrays[0]), self._batch_size):
            yield tuple(Tensor(x[i : i + self._batch_size]) for x in self._arrays)


@dataclasses.dataclass
class Loop:
    """A model, its loss, optimizer and metric, and a jitted step over lists of their values."""

    model: keras.Model
    loss: Callable[[Any, Any], Any]  # labels first
    optimizer: Any = None  # of optax
    metric: Any = None

    def __post_init__(self) -> None:
        if self.metric:
            self.result = jax.jit(lambda state: self.metric.stateless_result(state[-1]))
        self.gradient = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        self.train_step = jax.jit(self._train_step)
        self.eval_step = jax.jit(self._eval_step)

    def compute_loss_and_updates(
        self, trainable: Any, non_trainable: Any, x: Any, y: Any, training: bool
    ) -> Any:
        y_pred, non_trainable, losses = self.model.stateless_call(
            trainable, non_trainable, x, return_losses=True, training=training
        )
        loss = self.loss(y, y_pred)
        for added in losses:
            loss = loss + added
        return loss, (y_pred, non_trainable)

    def start(self) -> Any:
        """The values of all variables now."""
        trainable = values(self.model.trainable_variables)
        non_trainable = values(self.model.non_trainable_variables)
        optimizer = self.optimizer.init(trainable)
        return trainable, non_trainable, optimizer, values(self.metric.variables)

    def _train_step(self, state: Any, batch: Any) -> Any:
        trainable, non_trainable, optimizer, metric = state
        x, y = batch
        (loss, (y_pred, non_trainable)), grads = self.gradient(trainable, non_trainable, x, y, True)
        updates, optimizer = self.optimizer.update(grads, optimizer, trainable)
        trainable = optax.apply_updates(trainable, updates)
        metric = self.metric.stateless_update_state(metric, y, y_pred)
        return loss, (trainable, non_trainable, optimizer, metric)

    def _eval_step(self, state: Any, batch: Any) -> Any:
        trainable, non_trainable, metric = state
        x, y = batch
        loss, (y_pred, non_trainable) = self.compute_loss_and_updates(
            trainable, non_trainable, x, y, False
        )
        metric = self.metric.stateless_update_state(metric, y, y_pred)
        return loss, (trainable, non_trainable, metric)

    def epoch(self, state: Any, batches: Iterable[Any]) -> tuple[list[float], list[float], Any]:
        """Losses and running metric of every step, and the state after them."""
        losses, running = [], []
        for x, y in batches:
            loss, state = self.train_step(state, (x, y))
            losses.append(np.asarray(loss))
            running.append(float(self.result(state)))
        return losses, running, state

    def reset(self, state: Any) -> Any:
        return *state[:3], values(self.metric.variables)

    def write_back(self, state: Any) -> keras.Model:
        for variables, values in (
            (self.model.trainable_variables, state[0]),
            (self.model.non_trainable_variables, state[1]),
        ):
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
        return self.model


def values(variables: Iterable[Any]) -> list[Any]:
    return [v.value for v in variables]


def batches(arrays: Arrays, size: int) -> list[Arrays]:
    return [
        tuple(x[i : i + size] for x in arrays)  # type: ignore[misc]
        for i in range(0, len(arrays[0]), size)
    ]


def assert_same(got: Iterable[Any], expected: Iterable[Any]) -> None:
    """Equal, to the bit."""
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def assert_close(got: Iterable[Any], expected: Iterable[Any]) -> None:
    """Equal but for last bits: the compiler may round a sum otherwise in a loop than in a step."""
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)


def assert_fused(got: Iterable[Any], expected: Iterable[Any]) -> None:
    """Equal to the bit with jax 0.10; with 0.12 the compiler rounds more sums anew in a loop."""
    if jax.__version_info__ < (0, 11):
        assert_same(got, expected)
    else:
        assert_close(got, expected)
