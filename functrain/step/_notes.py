"""Notes on errors of a step: the shapes of its batch, params that do not fit, traced values."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from functrain.common import _tree
from functrain.common._types import PyTree

_SHAPES_PREFIX = "Shapes: "
_WIDTH_PREFIX = "The inputs do not fit the params: "
_TRACED_VALUE_ADVICE = (
    "A traced value has no truth value, so a Python `if`, `while`, `and` or `assert` cannot depend "
    "on it. Choose between arrays with jnp.where(condition, a, b), between computations with "
    "jax.lax.cond. To see values while debugging, run uncompiled: functrain.fit(..., jit=False); a "
    "Keras model after model.compile(..., run_eagerly=True); your own loop within "
    "jax.disable_jit()."
)


@contextlib.contextmanager
def error_notes(batch: PyTree, params: PyTree = ()) -> Iterator[None]:
    """Context manager: adds notes to an exception that a step raises for a batch.

    Args:
      batch: The batch; of a tuple, the first element is the model's inputs.
      params: The params, if they are known.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):
            add_notes(error, _describe(batch))
        # The loss of a micro-batch is inside that of its batch, and would add the note again.
        if not any(note.startswith(_WIDTH_PREFIX) for note in getattr(error, "__notes__", [])):
            add_advice(error, _width_note, error, batch, params)
        raise


def add_advice(error: Exception, make_note: Callable[..., str], *args: Any) -> None:
    """Adds the note `make_note(*args)` unless it is empty; an error in making it is dropped."""
    # Advice must never hide the error of the user's own code.
    with contextlib.suppress(Exception):
        note = make_note(*args)
        if note:
            error.add_note(note)


def add_notes(error: Exception, batch: str) -> None:
    """Adds the shapes of the batch to an error, and advice if a traced value was used as a bool.

    Args:
      error: The exception that a step raised.
      batch: The leaves of the batch, with their dtypes and shapes.
    """
    # Notes are nested: an error passes through a loss, the loop and `bridge`, which all add them.
    notes = getattr(error, "__notes__", [])
    if not any(note.startswith(_SHAPES_PREFIX) for note in notes):
        error.add_note(f"{_SHAPES_PREFIX}{batch}.")
    is_bool_of_tracer = isinstance(error, jax.errors.TracerBoolConversionError)
    if is_bool_of_tracer and _TRACED_VALUE_ADVICE not in notes:
        error.add_note(_TRACED_VALUE_ADVICE)


def _describe(batch: PyTree, max_leaves: int = 12) -> str:
    """Returns the paths, dtypes and shapes of the first leaves of a batch."""
    texts = []
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    for path, leaf in leaves[:max_leaves]:
        texts.append(f"batch{jax.tree_util.keystr(path)} {_tree.spec(leaf)}")
    if len(leaves) > max_leaves:
        texts.append(f"{len(leaves) - max_leaves} more leaves")
    return ", ".join(texts) or "a batch without leaves"


def _width_note(error: Exception, batch: PyTree, params: PyTree) -> str:
    """Returns a note if an input has another width than a kernel expects, else an empty string."""
    mismatched = _mismatched_sizes(str(error))
    # Labels meet outputs, not params: only inputs are compared.
    prefix, inputs = "batch", batch
    if isinstance(batch, tuple | list) and batch:
        prefix, inputs = "batch[0]", batch[0]
    for path, x in jax.tree_util.tree_leaves_with_path(inputs):
        for name, kernel in _tree.leaves_with_path(params):
            # Kernels of dense and convolution layers are [..., inputs, outputs].
            sizes = [*jnp.shape(x)[-1:], *jnp.shape(kernel)[-2:-1]]
            if len(set(sizes)) == 2 and mismatched.issuperset(sizes):
                width, expected = sizes
                leaf = f"{prefix}{jax.tree_util.keystr(path)} {_tree.spec(x)}"
                return (
                    f"{_WIDTH_PREFIX}{leaf} has {width} features, {name} {_tree.spec(kernel)} "
                    f"expects {expected}. Pass inputs with {expected} features, or create params "
                    f"for inputs with {width}, for example with model.init(key, x)."
                )
    return ""


def _mismatched_sizes(message: str) -> set[int]:
    """Returns the sizes that are in only one of the last two shapes of an error message.

    jax and flax write shapes that do not fit into the message, such as "got (5,) and (7,)". Their
    errors do not have them as attributes.
    """
    shapes = re.findall(r"\(([\d, ]+)\)", message)[-2:]
    sizes = [set(map(int, re.findall(r"\d+", shape))) for shape in shapes]
    return sizes[0] ^ sizes[1] if len(sizes) == 2 else set()
