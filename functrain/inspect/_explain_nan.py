"""A search for the operation that made the first NaN or infinity."""

import dataclasses
from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from functrain.common import _tree
from functrain.common._types import PyTree, traits_of
from functrain.engine._guards import tracing_guards
from functrain.inspect._not_finite import (
    NotFinite,
    OutOfRange,
    count_bad,
    describe_range,
    has_infinity,
    has_nan,
)
from functrain.inspect._origins import Event, Search, Value
from functrain.step._check import check_step


def explain_nan(state: PyTree, step: Any, batch: PyTree) -> NotFinite | None:
    """Finds the operation of a step that made the first NaN or infinity.

    The step runs uncompiled, operation by operation, so it is slow, and a compiled program may
    round differently. The operation is the first whose output has NaN while its inputs have none,
    and which led to the NaN in the result, so infinities that do no harm, such as those of masks,
    are ignored. If an infinity caused the NaN, `cause` is the operation that made the infinity, or
    the leaf of the state or the batch that held it. Other infinities in the state or the batch are
    reported only if no operation made one, or NaN. Constants of the step, such as ``jnp.nan``, are
    not named.

    Args:
      state: The state before the step, with metrics or without. Not changed.
      step: ``(state, batch) -> (state, logs)``, with metrics or without; not jitted.
      batch: The batch.

    Returns:
      The operation, which prints as text; None if everything is finite, or only a constant is
      not.

    Raises:
      TypeError: `step` is not a step.

    Examples:
      >>> import jax.numpy as jnp
      >>> def step(w, x):
      ...     return w - jnp.log(x - 1.0).sum(), {}
      >>> culprit = explain_nan(jnp.zeros(()), step, jnp.array([2.0, 1.0]))
      >>> print(culprit.operation, "|", culprit.bad_values, "|", culprit.inputs[0])
      log | -inf in 1 of 2 | float32[2]: 0 to 1
    """
    check_step(step)
    state = traits_of(step).wrap_state(state)
    search, inputs = Search(), []
    # The leaves in the order of the step's arguments. jax would sort the keys of a plain dict.
    for path, x in _tree.leaves_with_path(OrderedDict(state=state, batch=batch)):
        # As jax converts the arguments of a step: without x64, float64 becomes float32.
        x = jnp.asarray(x) if isinstance(x, float | complex | np.ndarray) else x
        if has_nan(x):
            return NotFinite("input", count_bad(x, is_nan=True), path)
        infinity = None
        if has_infinity(x):
            infinity = search.add(NotFinite("input", count_bad(x, is_nan=False), path))
        inputs.append(Value(x, infinity=infinity))
    with tracing_guards():
        closed: Any = jax.make_jaxpr(step)(state, batch)
    culprit = _choose(search.events, search.run(closed, inputs))
    if culprit is None or culprit.out_of_range is None:
        return culprit
    source = _find_leaf(culprit.out_of_range, batch)
    return dataclasses.replace(culprit, out_of_range=culprit.out_of_range._replace(leaf=source))


def _choose(events: list[Event], outputs: list[Value]) -> NotFinite | None:
    """Returns the event that explains the outputs of a step, or else the first one."""
    # NaN first: an infinity in the result may be intended, as in a mask.
    nan = [x.nan for x in outputs if x.nan and has_nan(x.array)]
    infinities = [x.infinity for x in outputs if x.infinity and has_infinity(x.array)]
    operations = [event for event in infinities if not event.is_input]
    if nan or operations:
        return min(nan or operations).description
    without_effect = [event for event in events if event.is_nan]
    if without_effect:
        return dataclasses.replace(without_effect[0].description, reaches_output=False)
    # Infinities may be meant, as that of the best loss so far.
    return events[0].description if events and events[0].is_input else None


def _find_leaf(out_of_range: OutOfRange, batch: PyTree) -> str:
    """Returns the first leaf of integers that contains all of the indices, with its range."""
    for path, x in _tree.leaves_with_path({"batch": batch}):
        if _tree.is_array(x) and jnp.issubdtype(x.dtype, jnp.integer):
            values = np.unique(np.asarray(x)).astype(np.int64)
            # jax counts negative indices from the end, as NumPy does.
            indices = np.where(values < 0, values + out_of_range.size, values)
            if set(out_of_range.indices) <= set(indices.tolist()):
                return f"{path}, {describe_range(x)}"
    return ""
