"""A model that predicts, for programs that have jax."""

import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from functrain import rewrites as rewriting
from functrain.checkpoint._leaves import cpu_device
from functrain.common import _repr
from functrain.common._checks import require
from functrain.common._library import import_optional
from functrain.common._platform import compiling_for
from functrain.common._types import PyTree, Step
from functrain.engine._guards import tracing_guards
from functrain.engine._plan import nbytes
from functrain.export._atomic import atomic_write, require_free
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
    """Writes a model with its params to one file, which predicts with jax alone.

    To load it::

        import jax
        with open(path, "rb") as file:
            predict = jax.export.deserialize(bytearray(file.read())).call
        outputs = predict(inputs)

    The file holds a program of `jax.export` and the arrays of the state that it needs (not those of
    the optimizer), but no Python code. JAX promises to run it for at least six months. Both sides
    need flatbuffers: ``pip install 'functrain[export]'`` to write it, ``pip install flatbuffers``
    to load it.

    The program is compiled where it is loaded. On CPU, jaxlib before 0.11.1 compiles some sums of
    products wrongly (https://github.com/jax-ml/jax/issues/39103). With such a jaxlib, call
    ``jax.jit(predict, compiler_options={"xla_cpu_experimental_ynn_fusion_type": ""})``.

    Args:
      path: The file. Missing folders are created.
      state: As for `functrain.predict`.
      step: From `functrain.predict_step`.
      inputs: A batch, or its shapes and dtypes (`jax.ShapeDtypeStruct`); its values are not used.
      shapes: The axes that may have any length, in the form of `jax.export.symbolic_args_specs`, by
        default the first axis. One text for all arrays, such as ``"n, length, 3"``, or a tree of
        them; None for the shapes of `inputs` only.
      platforms: The platforms that it will run on: "cpu", "cuda", "rocm", "tpu". By default, the
        platform that exports it.
      rewrites: As for `functrain.fuse`, if there is a single platform; for several nothing is
        rewritten. Most rewrites need to know all lengths: ``shapes=None``.
      overwrite: True replaces an existing file.

    Raises:
      FileExistsError: The file exists, and `overwrite` is False.
      ImportError: flatbuffers is not installed.
      TypeError: The step carries metrics.
      ValueError: A platform is unknown, `shapes` do not fit, the arrays are larger than 2 GiB,
        which such a file cannot hold; or the step returns an object of a class that jax cannot
        write.
      jax.errors.InconclusiveDimensionOperation: The model computes with the lengths of these axes.

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
    to_install = "jax writes such files with flatbuffers: pip install 'functrain[export]'"
    import_optional("flatbuffers", to_install)
    check_predict_step(step)
    target = require_free(path, overwrite=overwrite)
    platforms = platforms or jax.export.default_export_platform()
    names = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    require(set(names) <= set(PLATFORMS), "platforms", f"some of {PLATFORMS}", names)
    # Checked before memory is taken.
    size = nbytes(getattr(state, "params", ()))
    advice = "Write the params with functrain.export.params, and keep the function as code."
    expected = "arrays of less than 2 GiB, the limit of such a file"
    require(size < 2**31, "state", expected, _repr.format_bytes(size), advice)
    # On one device: the program would otherwise need as many devices as the mesh has.
    arrays = jax.device_put(state, cpu_device())

    def predict(inputs: PyTree) -> PyTree:
        result = step(arrays, inputs)
        is_pair = isinstance(result, tuple) and len(result) == 2
        advice = "Make one with functrain.predict_step(model)."
        expected = "a function that returns (state, outputs)"
        require(is_pair, "step", expected, result, advice, error=TypeError)
        return result[1]

    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), inputs)
    if shapes is not None:
        # One text is meant for all arguments, a tree for the one argument.
        args_shapes = shapes if isinstance(shapes, str) else (shapes,)
        (specs,) = jax.export.symbolic_args_specs((specs,), args_shapes)
    # Rewrites are for one platform, and a program for several cannot have those of each.
    platform = "several" if len(names) > 1 else re.sub("cuda|rocm", "gpu", names[0])
    try:
        with tracing_guards(), compiling_for(platform):
            optimized = jax.jit(rewriting.optimize(predict, rewrites))
            program = jax.export.export(optimized, platforms=names)(specs)
    except jax.errors.InconclusiveDimensionOperation as error:
        error.add_note(
            f"functrain.export.predict traced the step for {shapes!r}. With shapes=None the file "
            "is for the shapes of inputs and no others."
        )
        raise
    data = program.serialize()
    with atomic_write(target) as file:
        file.write(data)
