"""Flax modules, linen and nnx, as Keras layers."""

import functools
import inspect
import random
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras

from bridge.model import _flax_modules
from bridge.model._functions import find_function, name_of
from bridge.model._scope import name_scopes
from bridge.model._variables import OVERWRITTEN
from functrain.internal import PyTree, require, require_instance
from functrain.internal import tree as _tree


def from_flax(
    module: Any,
    *,
    variables: Mapping[str, PyTree] | None = None,
    seed: int | None = None,
    **kwargs: Any,
) -> "FlaxLayer":
    """Returns a Keras layer that runs a flax module, linen or nnx.

    The layer works in Sequential, Functional and subclassed models, in `model.fit`, `bridge.fit`
    and `bridge.from_keras`. Parameters are trainable weights. Batch statistics and other
    collections are non-trainable weights, which are updated in training. Float8 scales are
    trainable weights that optimizers overwrite with their gradients, as in Keras's own float8
    layers. Weights have the same paths as in flax, such as ``net/params/Dense_0/kernel``.
    TensorFlow is not needed.

    If the module's ``__call__`` takes `training`, `train`, `deterministic` or
    `use_running_average`, the layer passes it. A `keras.random.SeedGenerator` of the layer serves
    every random stream of the module. Losses that a linen module sows into
    `losses` are losses of the layer. Freezing the layer freezes its parameters; its statistics are
    still updated when it is called with ``training=True``.

    Args:
      module: An instance of `flax.linen.Module` or `flax.nnx.Module`, called as
        ``module(inputs)``, where inputs are one pytree; or a function without arguments that
        creates one. To save a whole model, pass a function that is registered with
        `keras.saving.register_keras_serializable`: the file has its name. Weights alone can be
        saved for every module.
      variables: The variables of a linen module, as its `init` returns them. If None, they are
        initialized when the layer is built. An nnx module has its own values, which are copied.
      seed: The seed of the initial values, and of dropout and other random layers. If None, a seed
        is drawn, as in Keras's own layers: `keras.utils.set_random_seed` makes runs repeatable.
      **kwargs: Arguments of `keras.Layer`: `name`, `dtype`, `trainable`.

    Returns:
      The layer. Besides the attributes of every layer it has `module`, and ``to_flax()``, which
      returns copies of the current values: the variables of a linen module, or a new nnx module.

    Raises:
      TypeError: `module` is not an instance of a flax module, or does not create one; or its call
        has required arguments that the layer does not know.
      ValueError: `variables` are passed with an nnx module.

    Examples:
      >>> import flax.linen as nn, keras
      >>> class Net(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, x, train):
      ...         x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
      ...         return nn.Dropout(0.5, deterministic=not train)(x)
      >>> layer = from_flax(Net(), name="net")
      >>> layer.build((None, 3))
      >>> [weight.path for weight in layer.trainable_weights][-2:]
      ['net/params/Dense_0/bias', 'net/params/Dense_0/kernel']
      >>> model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
      >>> model.compile("adam", "mse")
    """
    return FlaxLayer(module, variables=variables, seed=seed, **kwargs)


class FlaxCollection(keras.Layer):  # type: ignore[misc]  # keras has no types
    """One level of flax's nested dicts: its variables, and the layers of the levels below."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # An attribute with this name, since the paths of weights in Keras's files contain it.
        self.below: dict[str, FlaxCollection] = {}
        self.built = True


@keras.saving.register_keras_serializable(package="bridge")
class FlaxLayer(keras.Layer):  # type: ignore[misc]  # keras has no types
    """The Keras layer that `from_flax` returns.

    Attributes:
      module: The flax module.

    Examples:
      >>> import flax.linen as nn
      >>> layer = from_flax(nn.Dense(2))
      >>> layer.build((None, 3))
      >>> layer.to_flax()["params"]["kernel"].shape
      (3, 2)
    """

    def __init__(
        self,
        module: Any,
        *,
        variables: Mapping[str, PyTree] | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.source = module
        self.module = _to_module(module)
        self.seed = seed
        self.collections: dict[str, FlaxCollection] = {}
        self._flax = _flax_modules.wrap(self.module, variables)
        self._input_specs: PyTree = None

    def __call__(self, inputs: PyTree, *args: Any, **kwargs: Any) -> PyTree:
        """Calls the layer, and builds it in the first call."""
        # Keras passes only the shapes of inputs to `build`, but an embedding needs to know that
        # its inputs are integers.
        if not self.built:
            specs = keras.tree.map_structure(_to_keras_tensor, inputs)
            # Not by assignment: Keras tracks attributes and would replace dicts by its containers.
            self.__dict__["_input_specs"] = specs
        return super().__call__(inputs, *args, **kwargs)

    def build(self, input_shape: PyTree) -> None:
        """Creates the weights."""
        specs = self._input_specs
        if specs is None:
            to_tensor = functools.partial(keras.KerasTensor, dtype=self.compute_dtype)
            specs = keras.tree.map_shape_structure(to_tensor, input_shape)
        # Keras draws the seeds of its own layers in the same way.
        seed = random.randint(1, 10**9) if self.seed is None else self.seed
        # Keras may build a layer while something is traced, such as the first batch of a model.
        with jax.ensure_compile_time_eval():
            inputs = keras.tree.map_structure(self._to_zeros, specs)
            values = self._flax.first_values(seed, inputs)
        leaves, structure = jax.tree_util.tree_flatten_with_path(values)
        variables = [self._add_variable(_tree.keys(path), leaf) for path, leaf in leaves]
        # Not by assignment: Keras would track the variables a second time.
        self.__dict__["_flax_variables"] = jax.tree.unflatten(structure, variables)
        self.seed_generator = keras.random.SeedGenerator(self.seed)

    def call(self, inputs: PyTree, training: bool | None = None) -> PyTree:
        """Runs the module."""
        rng = jax.random.wrap_key_data(self.seed_generator.next(), impl="threefry2x32")
        values = self._values()
        applied = self._flax.apply(values, inputs, rng=rng, training=bool(training))
        trees = self._flax_variables, values, {**values, **applied.model_state}
        for variable, old, new in zip(*map(jax.tree.leaves, trees), strict=True):
            # An assignment in a step without updates would be an operation for nothing.
            if new is not old:
                variable.assign(new)
        for loss in applied.losses:
            self.add_loss(loss)
        return applied.outputs

    def to_flax(self) -> Any:
        """Returns copies of the current values in the form of the flax module.

        Returns:
          For a linen module its variables, for ``layer.module.apply``; for an nnx module a new one.

        Raises:
          ValueError: The layer is not built.
        """
        advice = "Call it once on a batch."
        require(self.built, f"layer {self.name!r}", "a built layer", type(self), advice)
        return self._flax.to_flax(self._values())

    def get_config(self) -> dict[str, Any]:
        """Returns the settings of the layer, with the name of the function that makes the module.

        Raises:
          ValueError: The module was not made by a function that is registered with Keras.
        """
        name = name_of(self.source, f"layer {self.name!r}")
        return {**super().get_config(), "module": name, "seed": self.seed}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FlaxLayer":
        """Returns the layer with the settings that `get_config` returned.

        Raises:
          ValueError: No function of that name is registered with Keras.
        """
        return cls(**{**config, "module": find_function(config["module"])})

    def get_build_config(self) -> None:
        """Returns None: a loaded layer is built by its first call, which has the inputs' dtypes."""

    def _values(self) -> PyTree:
        return jax.tree.map(lambda variable: variable.value, self._flax_variables)

    def _to_zeros(self, x: Any) -> jax.Array:
        """Returns inputs with which the module is initialized; unknown sizes become 1."""
        dtype = self.compute_dtype if "float" in x.dtype else x.dtype
        shape = [1 if size is None else size for size in x.shape]
        return jnp.zeros(shape, jax.dtypes.canonicalize_dtype(dtype))

    def _add_variable(self, path: tuple[str, ...], value: jax.Array) -> Any:
        """Creates the weight with a path of keys, in nested layers for its levels."""
        *levels, name = path
        collections = self.collections
        for level in levels:
            if level not in collections:
                collections[level] = FlaxCollection(name=level)
            node = collections[level]
            collections = node.below
        with name_scopes(levels[:-1]):
            return node.add_weight(
                shape=value.shape,
                dtype=value.dtype.name,
                initializer=lambda shape, dtype: jnp.array(value, dtype=dtype),
                trainable=levels[0] in ("params", OVERWRITTEN),
                # Statistics keep their precision under a mixed precision policy.
                autocast=levels[0] == "params",
                overwrite_with_gradient=levels[0] == OVERWRITTEN,
                name=name,
            )


def _to_module(module: Any) -> Any:
    """Returns a flax module, which may be the result of a function.

    Raises:
      TypeError: It is not an instance of a flax module.
    """
    # Imported here, since `import bridge` must not import flax.nnx (see tests/test_house.py).
    from flax import nnx

    is_function = inspect.isroutine(module) or isinstance(module, functools.partial)
    instance = module() if is_function else module
    expected = "an instance of a linen or nnx module, or a function that creates one"
    advice = "Construct the module first, as in Net(...)."
    require_instance("module", instance, nn.Module | nnx.Module, expected, advice)
    return instance


def _to_keras_tensor(x: Any) -> Any:
    dtype = keras.backend.standardize_dtype(getattr(x, "dtype", keras.config.floatx()))
    return keras.KerasTensor(getattr(x, "shape", ()), dtype)
