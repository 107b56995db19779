"""A model that predicts, for whatever has jax."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from functrain import rewrites as rewriting
from functrain.checkpoint._leaves import cpu_device
from functrain.common import _repr, _tree
from functrain.common._checks import require
from functrain.common._library import import_optional
from functrain.common._types import PyTree, Step
from functrain.engine._guards import tracing_guards
from functrain.engine._plan import nbytes
from functrain.export._whole import require_free, written
from functrain.rewrites import Mode
from functrain.step._eval import check_predict_step

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def predict(
    path: str | os.PathLike[str],
    state: PyTree,
    step: Step[Any],
    inputs: PyTree,
    *,
    shapes: PyTree = "batch, ...",
    platforms: Sequence[str] | None = None,
    rewrites: Mode = "auto",
    overwrite: bool = False,
) -> None:
    """Writes a model with its params into one file, which predicts where there is jax alone.

    There::

        import jax
        with open(path, "rb") as file:
            predict = jax.export.deserialize(bytearray(file.read())).call
        outputs = predict(inputs)

    The file holds a program as `jax.export` makes it, with the arrays of the state that it needs
    (no optimizer's), and no code of Python. JAX promises to run it for six months at least. Both
    sides need flatbuffers: ``pip install 'functrain[export]'`` here, ``pip install flatbuffers``
    there.

    The program is compiled where it is loaded. On CPUs jaxlib before 0.11.1 compiles some sums of
    products wrongly (https://github.com/jax-ml/jax/issues/39103). There, call
    ``jax.jit(predict, compiler_options={"xla_cpu_experimental_ynn_fusion_type": ""})``.

    Args:
      path: The file. Missing folders are made.
      state: As for `functrain.predict`.
      step: From `functrain.predict_step`.
      inputs: A batch, or its shapes and dtypes (`jax.ShapeDtypeStruct`); its values are not used.
      shapes: Which axes may have any length, as `jax.export.symbolic_args_specs` takes them: the
        first by default. One text for all arrays, or a tree of them; ``"n, length, 3"``; None for
        the shapes of `inputs` and no others.
      platforms: Where it is to run: "cpu", "cuda", "rocm", "tpu". Where it is made, by default.
      rewrites: As for `fuse`, where "cpu" is the only platform; with others nothing is rewritten.
        Most rewrites want to know all lengths: ``shapes=None``.
      overwrite: Replace a file.

    Raises:
      FileExistsError: There is a file, and `overwrite` is False.
      ImportError: flatbuffers is not installed.
      TypeError: The step carries metrics; or what it returns is of a class that jax does not know
        without functrain.
      ValueError: A platform is not known, `shapes` do not fit, or the arrays are larger than
        2 GiB, which such a file cannot hold.
      jax.errors.InconclusiveDimensionOperation: The model asks for the lengths of these axes.

    Examples:
      >>> import functrain as ft, jax, jax.numpy as jnp, optax, tempfile
      >>> model = ft.Model(
      ...     init=lambda key, x: ({"w": jnp.ones((3, 1))}, {}),
      ...     apply=lambda p, s, x, *, rng=None, training=False: ft.ModelOutput(x @ p["w"], s),
      ... )
      >>> state = ft.TrainState.create(params={"w": jnp.ones((3, 1))}, tx=optax.sgd(0.1))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     ft.export.predict(f"{folder}/model", state, ft.predict_step(model), jnp.ones((1, 3)))
      ...     with open(f"{folder}/model", "rb") as file:
      ...         predict = jax.export.deserialize(bytearray(file.read())).call
      >>> predict(jnp.ones((5, 3))).shape
      (5, 1)
    """
    import_optional(
        "flatbuffers", "jax writes such files by flatbuffers: pip install 'functrain[export]'"
    )
    check_predict_step(step)
    require_free(path, overwrite=overwrite)
    targets = _targets(jax.export.default_export_platform() if platforms is None else platforms)
    for leaf_path, leaf in _tree.leaves_with_path(state):
        expected, advice = "a live array", "Take the state that the program returned."
        require(not _tree.is_deleted(leaf), leaf_path, expected, leaf, advice)
    # Before memory is taken; what a file holds is known afterwards.
    _require_small(nbytes(getattr(state, "params", ())))
    arrays = jax.device_put(state, cpu_device())  # from all devices of a mesh, in one piece

    def predict(inputs: PyTree) -> PyTree:
        result = step(arrays, inputs)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(
                f"step: expected one that returns (state, outputs), got {type(result).__name__} "
                "from it. Make one with functrain.predict_step(model)."
            )
        return result[1]

    mode = rewrites if set(targets) == {"cpu"} else "off"
    with tracing_guards(step):
        program = _exported(rewriting.optimize(predict, mode), inputs, shapes, targets)
    data = _serialized(program)
    with written(path) as name, open(name, "wb") as file:
        file.write(data)


def _targets(platforms: str | Sequence[str]) -> tuple[str, ...]:
    targets = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    if not targets or not set(targets) <= set(PLATFORMS):
        raise ValueError(f"platforms: expected some of {PLATFORMS}, got {platforms!r}")
    return targets


def _exported(fn: Any, inputs: PyTree, shapes: PyTree, platforms: Sequence[str]) -> Any:
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), inputs)
    if shapes is not None:
        try:
            wanted = shapes if isinstance(shapes, str) else (shapes,)
            (specs,) = jax.export.symbolic_args_specs((specs,), wanted)
        except ValueError as error:
            raise ValueError(
                f"shapes: expected texts such as 'batch, ...' that fit inputs, got {shapes!r}: "
                f"{error}"
            ) from error
    try:
        return jax.export.export(jax.jit(fn), platforms=platforms)(specs)
    except Exception as error:
        if shapes is not None:
            error.add_note(
                f"While functrain.export.predict traced the step for {shapes!r}. If it needs the "
                "lengths of these axes as numbers: shapes=None, for the shapes of inputs and no "
                "others."
            )
        raise


_MOST = 2**31 - 1  # bytes in a flatbuffer


def _require_small(size: int) -> None:
    if size > _MOST:
        raise ValueError(
            f"state: expected arrays of less than 2 GiB, which is what such a file can hold, got "
            f"{_repr.format_bytes(size)}. Write the params with functrain.export.params, and "
            "keep the function as code."
        )


def _serialized(program: Any) -> bytearray:
    _require_small(len(program.mlir_module_serialized))
    try:
        data: bytearray = program.serialize()
    except ValueError as error:
        if "unregistered" not in str(error):
            raise
        raise TypeError(
            "step: expected inputs and outputs of dicts, lists, tuples and arrays, which jax knows "
            f"without functrain, got {program.out_tree}: {error}"
        ) from error
    return data
