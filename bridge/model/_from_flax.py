"""Flax modules, linen and nnx, as Keras layers."""

import functools
import inspect
import random
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras

from bridge.model import _flax_modules
from bridge.model._plain_data import PlainData
from bridge.model._scope import name_scopes
from functrain.internal import PyTree
from functrain.internal import tree as _tree

_FILES = PlainData(
    namespaces=("flax.linen", "flax.linen.initializers", "jax.nn", "jax.numpy", "jax.lax"),
    advice="Make the layer of a function that makes the module, registered with Keras:\n"
    "  @keras.saving.register_keras_serializable()\n"
    "  def make_net():\n"
    "      return Net(...)\n"
    "  layer = bridge.from_flax(make_net)\n"
    "Or save weights only: model.save_weights('x.weights.h5').",
)


def from_flax(
    module: Any,
    *,
    variables: Mapping[str, PyTree] | None = None,
    seed: int | None = None,
    **kwargs: Any,
) -> "FlaxLayer":
    """Returns a Keras layer that runs a flax module, linen or nnx.

    It is a layer like any other: in Sequential, Functional and subclassed models, in `model.fit`,
    `bridge.fit` and `bridge.from_keras`. Parameters are trainable weights; batch statistics and
    other collections are non-trainable ones, which move on in training. Weights have the paths
    they have in flax, such as ``net/params/Dense_0/kernel``. TensorFlow is not needed.

    Where the module's ``__call__`` takes `training`, `train`, `deterministic` or
    `use_running_average`, it is given. Where it draws random numbers, the layer holds a
    `keras.random.SeedGenerator` that serves every stream. Losses that a linen module sows into
    `losses` are the layer's losses. Freezing the layer freezes its parameters; statistics move on
    wherever it is called with ``training=True``.

    Args:
      module: An instance of `flax.linen.Module` or `flax.nnx.Module`, called as
        ``module(inputs)``, inputs being one pytree; or a function without arguments that makes
        one. A model is saved with its layers' settings: of a linen module these are its fields;
        for nnx, and for fields that cannot be written down, pass a function registered with
        `keras.saving.register_keras_serializable`. Saving weights alone takes anything.
      variables: Of a linen module, as its `init` returns them. None to initialize them when the
        layer is built. An nnx module has its own values already, which are copied.
      seed: Of the initial values and of dropout and the like. None to draw one, as Keras's own
        layers do: `keras.utils.set_random_seed` makes runs repeat.
      **kwargs: Of `keras.Layer`: `name`, `dtype`, `trainable`.

    Returns:
      The layer. Beside what every layer has: `module`, and ``to_flax()``, which returns copies of
      the values of now: a linen module's variables, or a new nnx module.

    Raises:
      TypeError: `module` is no instance of a flax module, or makes none; or its call needs
        arguments that are not known.
      ValueError: `variables` are none, or meet an nnx module.

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
    """One level of flax's nested dicts: its variables, and the levels below by name."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.below: dict[str, FlaxCollection] = {}
        self.built = True


@keras.saving.register_keras_serializable(package="bridge")
class FlaxLayer(keras.Layer):  # type: ignore[misc]  # keras has no types
    """What `from_flax` returns."""

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
        self.module = _instance(module)
        self.seed = seed
        self.collections: dict[str, FlaxCollection] = {}
        self._flax = _flax_modules.wrap(self.module, variables)
        self._note(None)

    def __call__(self, inputs: PyTree, *args: Any, **kwargs: Any) -> PyTree:
        """Notes the dtypes of inputs, which `build` is not told: an embedding needs integers."""
        if not self.built:
            self._note(keras.tree.map_structure(_symbolic, inputs))
        return super().__call__(inputs, *args, **kwargs)

    def build(self, input_shape: PyTree) -> None:
        """Makes the weights."""
        if self._known_inputs is None:
            tensor = functools.partial(keras.KerasTensor, dtype=self.compute_dtype)
            self._note(keras.tree.map_shape_structure(tensor, input_shape))
        inputs = keras.tree.map_structure(self._example, self._known_inputs)
        seed = random.randint(1, 10**9) if self.seed is None else self.seed  # as Keras draws it
        shapes, values = self._flax.first_values(seed, inputs)
        leaves, structure = jax.tree_util.tree_flatten_with_path(shapes)
        variables = [
            self._add(_tree.path_str(path).split("/"), leaf, _initializer(values, i))
            for i, (path, leaf) in enumerate(leaves)
        ]
        # Past Keras's tracking, which would hold the variables twice.
        self.__dict__["_variables_of_flax"] = jax.tree.unflatten(structure, variables)
        self._draws = [
            self._flax.draws(shapes, inputs, training=training) for training in (False, True)
        ]
        if any(self._draws):
            self.seed_generator = keras.random.SeedGenerator(self.seed)

    def call(self, inputs: PyTree, training: bool | None = None) -> PyTree:
        """Runs the module."""
        training = bool(training)
        rng = None
        if self._draws[training]:
            rng = jax.random.wrap_key_data(self.seed_generator.next(), impl="threefry2x32")
        values = self._values()
        applied = self._flax.apply(values, inputs, rng=rng, training=training)
        for name, collection in applied.model_state.items():
            trees = (self._variables_of_flax[name], values[name], collection)
            for variable, old, new in zip(*map(jax.tree.leaves, trees), strict=True):
                if new is not old:
                    variable.assign(new)
        for loss in applied.losses:
            self.add_loss(loss)
        return applied.outputs

    def to_flax(self) -> Any:
        """Returns copies of the values of now, as the module has them.

        Returns:
          Of a linen module its variables, for ``layer.module.apply``; of an nnx module a new one.

        Raises:
          ValueError: The layer is not built.
        """
        if not self.built:
            raise ValueError(
                f"layer {self.name!r}: expected a built layer, got one that has no values yet. "
                "Call it once on a batch."
            )
        return self._flax.to_flax(self._values())

    def get_config(self) -> dict[str, Any]:
        """Returns the layer's settings, with those of its module."""
        module = _FILES.encode(self.source, "module")
        return {**super().get_config(), "module": module, "seed": self.seed}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FlaxLayer":
        """Makes a layer from its settings."""
        return cls(**{**config, "module": _FILES.decode(config["module"])})

    def get_build_config(self) -> dict[str, Any]:
        """Returns what `build` knew of the inputs."""
        return {"inputs": keras.saving.serialize_keras_object(self._known_inputs)}

    def build_from_config(self, config: dict[str, Any]) -> None:
        """Builds a layer that is being loaded."""
        self._note(keras.saving.deserialize_keras_object(config["inputs"]))
        self.build(keras.tree.map_structure(lambda x: tuple(x.shape), self._known_inputs))

    def _values(self) -> PyTree:
        return jax.tree.map(lambda variable: variable.value, self._variables_of_flax)

    def _note(self, inputs: PyTree) -> None:
        # Past Keras's tracking, which makes dicts into its own.
        self.__dict__["_known_inputs"] = inputs

    def _example(self, x: Any) -> jax.ShapeDtypeStruct:
        dtype = self.compute_dtype if "float" in x.dtype else x.dtype
        shape = [1 if n is None else n for n in x.shape]
        return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))

    def _add(self, path: list[str], leaf: jax.ShapeDtypeStruct, initializer: Any) -> Any:
        """Makes the weight at a path, in a layer of its level."""
        *levels, name = path
        collections = self.collections
        for level in levels:
            if level not in collections:
                collections[level] = FlaxCollection(name=level)
            node = collections[level]
            collections = node.below
        with name_scopes(levels[:-1]):
            return node.add_weight(
                shape=leaf.shape,
                dtype=jnp.dtype(leaf.dtype).name,
                initializer=initializer,
                trainable=levels[0] == "params",
                autocast=levels[0] == "params",  # statistics keep their precision
                name=name,
            )


def _initializer(values: Callable[[], list[jax.Array]], i: int) -> Any:
    """Returns what makes the i-th value for Keras, which may ask for it after the build."""
    return lambda shape, dtype: jnp.array(values()[i], dtype=dtype)


def _instance(module: Any) -> Any:
    """Returns a module, from itself or from a function that makes it."""
    makes_one = inspect.isroutine(module) or isinstance(module, functools.partial)
    instance = module() if makes_one else module
    if not _flax_modules.is_module(instance):
        is_class = inspect.isclass(instance)
        got = f"the class {instance.__name__}" if is_class else type(instance).__name__
        raise TypeError(
            "module: expected an instance of flax.linen.Module or flax.nnx.Module, or a function "
            f"that makes one, got {f'{got} from {module}' if makes_one else got}. Construct the "
            "module first, as in Net(...)."
        )
    return instance


def _symbolic(x: Any) -> Any:
    dtype = keras.backend.standardize_dtype(getattr(x, "dtype", keras.config.floatx()))
    return keras.KerasTensor(getattr(x, "shape", ()), dtype)
