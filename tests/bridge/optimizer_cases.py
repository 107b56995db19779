"""Every optimizer that Keras has, in the settings that change what it does; and wild gradients."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

K = keras.optimizers
decay = K.schedules.ExponentialDecay

CASES: dict[str, Callable[[], Any]] = {
    "SGD": lambda: K.SGD(0.1),
    "SGD momentum": lambda: K.SGD(0.1, momentum=0.9),
    "SGD nesterov, decay": lambda: K.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD momentum, schedule": lambda: K.SGD(decay(0.1, 10, 0.8), momentum=0.9),
    "Adam": lambda: K.Adam(1e-2),
    "Adam amsgrad": lambda: K.Adam(1e-2, amsgrad=True),
    "Adam schedule": lambda: K.Adam(decay(1e-2, 10, 0.8)),
    "Adam clipnorm": lambda: K.Adam(1e-2, clipnorm=1.0),
    "Adam global_clipnorm": lambda: K.Adam(1e-2, global_clipnorm=1.0),
    "Adam clipvalue": lambda: K.Adam(1e-2, clipvalue=0.5),
    "Adam ema": lambda: K.Adam(1e-2, use_ema=True, ema_overwrite_frequency=7),
    "Adam accumulation, schedule": lambda: K.Adam(
        decay(1e-2, 10, 0.8), gradient_accumulation_steps=3
    ),
    "AdamW": lambda: K.AdamW(1e-2),
    "AdamW without biases": lambda: without_biases(K.AdamW(1e-2)),
    "RMSprop": lambda: K.RMSprop(1e-2),
    "RMSprop momentum": lambda: K.RMSprop(1e-2, momentum=0.5),
    "RMSprop momentum, schedule": lambda: K.RMSprop(decay(1e-2, 10, 0.8), momentum=0.5),
    "RMSprop centered": lambda: K.RMSprop(1e-2, centered=True),
    "Adadelta": lambda: K.Adadelta(1.0),
    "Adagrad": lambda: K.Adagrad(0.1),
    "Adamax": lambda: K.Adamax(1e-2),
    "Adafactor": lambda: K.Adafactor(1e-2),
    "Nadam": lambda: K.Nadam(1e-2),
    "Ftrl": lambda: K.Ftrl(0.1, l1_regularization_strength=0.01, beta=0.1),
    "Lion": lambda: K.Lion(1e-2),
    "Lion decay": lambda: K.Lion(1e-2, weight_decay=0.01),
    "Lamb": lambda: K.Lamb(1e-2),
    "Lamb decay": lambda: K.Lamb(1e-2, weight_decay=0.01),
    "Muon": lambda: K.Muon(1e-2),
    "ScheduleFreeAdamW": lambda: K.ScheduleFreeAdamW(1e-2, warmup_steps=5),
    "LossScaleOptimizer": lambda: K.LossScaleOptimizer(K.Adam(1e-2), dynamic_growth_steps=20),
    "MultiOptimizer": lambda: K.MultiOptimizer(
        K.OptimizerMap(K.SGD(0.1, momentum=0.9), {".*kernel": K.Adam(1e-2)})
    ),
}
SHAPES = {
    "dense": {"bias": (3,), "kernel": (4, 3)},
    "embedding": {"embeddings": (5, 2)},
    "out": {"bias": (), "kernel": (3, 5)},
}


def without_biases(optimizer: Any) -> Any:
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


def make_params(dtype: str = "float32") -> Any:
    """Params of very different sizes, zeros among them, in the order of Keras's own lists."""
    rng = np.random.default_rng(0)
    return {
        layer: {
            name: jnp.asarray(
                rng.normal(size=shape) * (name != "bias") * 10.0 ** rng.integers(-3, 2), dtype
            )
            for name, shape in shapes.items()
        }
        for layer, shapes in SHAPES.items()
    }


def wild_gradients(params: Any, steps: int = 100) -> Iterator[Any]:
    """Gradients of sizes from 1e-6 to 1e6, some of them zero."""
    rng = np.random.default_rng(1)
    for step in range(steps):
        size = 0.0 if step % 10 == 3 else 10.0 ** rng.uniform(-6, 6)
        yield jax.tree.map(
            lambda p, s=size: jnp.asarray(rng.normal(size=p.shape) * s, p.dtype), params
        )


def variables(params: Any) -> list[Any]:
    """Keras variables with the paths, values and order of params."""
    made = []
    for layer, held in params.items():
        for name, value in held.items():
            with keras.name_scope(layer):
                made.append(keras.Variable(value, dtype=str(value.dtype), name=name))
    return made


class ByKeras:
    """Keras's own updates of params, from its own `stateless_apply`."""

    def __init__(self, optimizer: Any, params: Any) -> None:
        held = variables(params)
        optimizer.build(held)
        self.optimizer = optimizer
        self.treedef = jax.tree.structure(params)
        self.params = [v.value for v in held]
        self.slots = [v.value for v in optimizer.variables]
        self._apply = jax.jit(optimizer.stateless_apply)

    def step(self, grads: Any) -> None:
        self.params, self.slots = self._apply(self.slots, jax.tree.leaves(grads), self.params)

    def scaled(self, grads: Any) -> Any:
        """Returns the gradients of the loss that Keras scales before it differentiates it."""
        scale = getattr(self.optimizer, "dynamic_scale", None)
        if scale is None:
            return grads
        value = self.slots[[id(v) for v in self.optimizer.variables].index(id(scale))]
        return jax.tree.map(lambda g: g * value.astype(g.dtype), grads)
