"""A model as a pair of pure functions, in the style of optax optimizers."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol

import jax

from functrain.common._checks import require_instance
from functrain.common._types import PyTree


class ModelOutput(NamedTuple):
    """The result of one application of a model.

    Attributes:
      outputs: The predictions, any pytree, leaves usually `f32[B, ...]`.
      model_state: The non-trainable collections after this application, with updated batch
        statistics and seed counters. It has the structure, shapes and dtypes of the `model_state`
        that was passed to `apply`.
      losses: The scalar losses that the model itself computes, each `f32[]` (regularizers,
        `add_loss`, a flax `losses` collection). They are not part of `outputs`; `supervised` adds
        them to the loss.

    Examples:
      >>> import jax.numpy as jnp
      >>> outputs, model_state, losses = ModelOutput(jnp.ones((2, 3)), {}, ())
      >>> outputs.shape
      (2, 3)
    """

    outputs: PyTree
    model_state: PyTree
    losses: tuple[jax.Array, ...] = ()


def _reject_use_as_array(self: ModelOutput, *args: Any) -> NoReturn:
    raise TypeError(
        "expected an array, got a ModelOutput, the result of model.apply. Its field `outputs` has "
        "the predictions: model.apply(...).outputs"
    )


def _reject_attribute(self: ModelOutput, name: str) -> NoReturn:
    raise AttributeError(
        f"A ModelOutput has no attribute {name!r}. It has the fields outputs (the predictions), "
        "model_state and losses: use model.apply(...).outputs"
    )


# Set here, since type checkers would compare methods with those of a tuple, whose `+` and `*`
# would silently concatenate and repeat.
for _name in ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]:
    setattr(ModelOutput, f"__{_name}__", _reject_use_as_array)
    setattr(ModelOutput, f"__r{_name}__", _reject_use_as_array)
for _name in ["neg", "abs", "eq", "ne", "lt", "le", "gt", "ge", "array", "jax_array"]:
    setattr(ModelOutput, f"__{_name}__", _reject_use_as_array)
# With None, an operator between an array of NumPy and a ModelOutput calls the methods above.
setattr(ModelOutput, "__array_ufunc__", None)  # noqa: B010
setattr(ModelOutput, "__getattr__", _reject_attribute)  # noqa: B010


class ApplyFn(Protocol):
    """A function ``(params, model_state, inputs, *, rng, training) -> ModelOutput``.

    A function that wraps another model's `apply` takes `rng` and `training` as ``**mode`` and
    passes them on.
    """

    def __call__(
        self,
        params: PyTree,
        model_state: PyTree,
        inputs: PyTree,
        /,
        *,
        rng: jax.Array | None = None,
        training: bool = False,
    ) -> ModelOutput:
        """Applies the model."""
        ...


class Model(NamedTuple):
    """A pair of pure functions.

    Attributes:
      init: ``init(key, inputs) -> (params, model_state)``. `inputs` is one pytree: a model with
        two inputs takes a tuple or a dict.
      apply: ``apply(params, model_state, inputs, *, rng=None, training=False) -> ModelOutput``.
        `rng` is a typed key `key[]` for dropout and other randomness, or None for a model that
        is deterministic or keeps its own seed counters in `model_state`.

    Examples:
      A model without any framework:

      >>> import jax, jax.numpy as jnp
      >>> def init(key, inputs):
      ...     return {"w": jax.random.normal(key, (inputs.shape[-1], 2))}, {}
      >>> def apply(params, model_state, inputs, *, rng=None, training=False):
      ...     return ModelOutput(inputs @ params["w"], model_state)
      >>> model = Model(init, apply)
      >>> params, model_state = model.init(jax.random.key(0), jnp.ones((4, 3)))
      >>> model.apply(params, model_state, jnp.ones((4, 3))).outputs.shape
      (4, 2)
    """

    init: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]]
    apply: ApplyFn


# The functions that make a Model, by the library whose class the argument has.
_MAKERS = {
    "keras": "bridge.from_keras",
    "flax.linen": "functrain.from_linen",
    "flax.nnx": "functrain.from_nnx",
    "equinox": "functrain.from_equinox",
}


def require_model(model: Any) -> None:
    """Raises TypeError unless an argument is a Model, with the function that makes one of it."""
    advice = f"Make one with {', '.join(_MAKERS.values())} or functrain.Model(init, apply)."
    # By the names of modules: importing Keras would load what the caller may not need.
    bases = inspect.getmro(model if isinstance(model, type) else type(model))
    for library, maker in _MAKERS.items():
        if any(f"{base.__module__}.".startswith(f"{library}.") for base in bases):
            advice = f"Pass {maker}(model)."
    require_instance("model", model, Model, "a functrain.Model", advice)
