"""Checks before the first step, so that mistakes do not surface after an epoch of training."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from functrain.checkpoint import Checkpointer
from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._types import PyTree, traits_of
from functrain.data._batches import Batches
from functrain.engine._guards import tracing_guards
from functrain.engine._placement import batch_sharding, is_explicit, require_same_run
from functrain.engine._programs import cached_program
from functrain.hooks._early_stopping import EarlyStopping
from functrain.hooks._evaluate import Evaluate
from functrain.hooks._logger import Logger
from functrain.hooks._profile import Profile
from functrain.hooks._reduce_lr_on_plateau import ReduceLROnPlateau
from functrain.hooks._sample import Sample
from functrain.hooks._terminate_on_nan import TerminateOnNaN
from functrain.hooks._watchdog import Watchdog
from functrain.loop._arguments import RunArguments
from functrain.loop._require import require_batches
from functrain.step._metered import MeteredStep

# Errors for hooks that monitor a value, by whether the step trains a population.
_WRONG_MONITOR = {
    True: "hooks: expected functrain.population.EarlyStopping, which watches each member, got "
    "{}, which watches one value.",
    False: "hooks: expected functrain.hooks.{}, got that of a population. The step of a population "
    "is functrain.population.step(step).",
}
# Hooks that add no values to events.
_ADD_NO_VALUES = (EarlyStopping, Logger, Profile, Sample, TerminateOnNaN, Watchdog)


def look_ahead(
    state: PyTree,
    step: Any,
    arguments: RunArguments,
    hooks: Sequence[Any],
    checkpointer: Checkpointer | None,
) -> None:
    """Traces each evaluation with its first batch, and checks the names of values.

    Nothing is computed. If the data can be iterated only once, the first evaluation continues the
    pass whose first batch was fetched here.

    Args:
      state: The state to train.
      step: The step that trains.
      arguments: The other arguments of the run.
      hooks: All hooks, in their order.
      checkpointer: The checkpointer of the run.

    Raises:
      ValueError: There is no data to evaluate on, an iterator is read twice, two values have one
        name, an evaluation is due by the clocks of several processes, or no log, metric or
        evaluation has the name of a monitored value. Monitored names are not checked if a hook is
        a function, which may add any value.
      TypeError: The value of a metric is not a scalar.
      Exception: Whatever tracing an evaluation raises.
    """
    batches, sharding = arguments.batches, arguments.sharding
    # The checks trace with shapes only, without the shardings that explicit mesh axes require.
    can_trace = arguments.jit and not is_explicit(sharding)
    # Most fits need no shapes of the state.
    abstract_state = functools.cache(lambda: jax.eval_shape(lambda: _tree.copy(state)))
    names = {"loss", *(_metric_names(step) if isinstance(step, MeteredStep) else ())}
    # A step without metrics may report no loss, so its names are unknown here.
    iterators = [batches]
    names_of_epochs = names.copy() if isinstance(step, MeteredStep) else set()
    knows_all_names = True
    missing: list[str] = []
    is_population = traits_of(step).is_population
    for hook in hooks:
        if isinstance(hook, Evaluate):
            placements = [x.sharding for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
            hook.require_same_steps([sharding, *placements])
            _require_own_iterator(hook.batches, iterators)
            iterators.append(hook.batches)
            _require_evaluation(abstract_state, hook, can_trace)
            evaluated = {hook.prefix + name for name in _metric_names(hook.step)}
            # Others are due within epochs: names that clash are found when two are due together.
            if getattr(hook.every, "epochs", None):
                hook.require_new(evaluated, names_of_epochs)
                names_of_epochs |= evaluated
            names |= evaluated
        knows_all_names &= isinstance(hook, (Evaluate, *_ADD_NO_VALUES))
        if isinstance(hook, EarlyStopping):
            if hook.of_members != is_population:
                raise ValueError(_WRONG_MONITOR[is_population].format(type(hook).__name__))
            if isinstance(hook, ReduceLROnPlateau):
                hook.require_rates(state)
            if knows_all_names:
                missing += {hook.monitor} - names
    # What is not a checkpointer at all is refused elsewhere.
    monitor = getattr(checkpointer, "monitor", None)
    # A checkpoint is the best for one member, so the value of one member must be named.
    if monitor in names and is_population:
        raise ValueError(
            f"monitor: expected None, or the value of one member, such as '{monitor}/0', got "
            f"{monitor!r}, which has a value for each member of the population. "
            "functrain.population.select takes the best member of any checkpoint."
        )
    if monitor is not None and is_population:
        # The value of one member, such as loss/3.
        monitor = re.sub(r"/\d+$", "", monitor)
    if monitor is not None and knows_all_names:
        missing += {monitor} - names
    if missing and can_trace:
        _require_logs(missing, names, abstract_state, step, batches)


def _metric_names(step: MeteredStep) -> set[str]:
    """Returns the names of the values that a step's metrics compute."""
    # Tracing them takes a millisecond, which is a fifth of a short fit.
    names: Any = cached_program(
        step, "metric names", lambda get_step: functools.cache(lambda: _trace_names(get_step()))
    )
    return set(names())


def _trace_names(step: MeteredStep) -> frozenset[str]:
    with tracing_guards():
        # In two steps: an init may return numbers, by which Python could not divide.
        values = jax.eval_shape(step.metrics.compute, jax.eval_shape(step.metrics.init))
    _tree.require_scalars(values)
    return frozenset(path for path, _ in _tree.leaves_with_path(values))


def _require_own_iterator(batches: Batches, others: Sequence[Batches]) -> None:
    """Raises ValueError for an iterator that is read twice, since each gets a part of it."""
    is_shared = any(batches.data is other.data for other in others) and batches.is_iterator
    expected = "an iterator that nothing else in this run reads"
    advice = "Each would get a part of the batches: pass data that can be iterated again."
    require(not is_shared, batches.name, expected, batches.data, advice)


def _require_evaluation(
    abstract_state: Callable[[], PyTree], hook: Evaluate, can_trace: bool
) -> None:
    """Raises now what the evaluation would raise after an epoch."""
    require_same_run(
        hook.batches, batch_sharding(hook.options["sharding"]), fuse=hook.options["fuse"]
    )
    hook.step.require_data(hook.batches.data, hook.batches.name)
    batch = hook.batches.first()
    require_batches(int(batch is not None), name=hook.batches.name)
    if not can_trace or not hook.options["jit"]:
        return
    shapes = [_tree.shapes(batch)]
    if hook.options["sharding"] is not None:
        # A step may divide batches itself, as with jax.shard_map, and fail for a smaller last one.
        known_shapes = map(_tree.shapes, hook.batches.known_shapes())
        shapes += [other for other in known_shapes if other != shapes[0]]
    try:
        for shape in shapes:
            with tracing_guards():
                # A new function: jax keeps what it has traced for as long as the function lives.
                jax.eval_shape(
                    lambda s, x: hook.step(hook.step.start(s), x), abstract_state(), shape
                )
    except Exception as error:
        error.add_note(
            f"The error was raised while the evaluation of {hook.batches.name} was traced, before "
            "the first step."
        )
        raise


def _require_logs(
    missing: Sequence[str],
    names: set[str],
    abstract_state: Callable[[], PyTree],
    step: Any,
    batches: Batches,
) -> None:
    """Raises ValueError if a monitored value is not among the logs of the step, either."""
    # An iterator's first batch is unknown: taking it here would take it from the training.
    shapes = batches.known_shapes()
    if not shapes:
        return
    carry = jax.eval_shape(traits_of(step).wrap_state, abstract_state())
    with tracing_guards():
        logs = jax.eval_shape(step, carry, _tree.shapes(shapes[0]))[1]
    all_names = names | {path for path, _ in _tree.leaves_with_path(logs)}
    for name in missing:
        if name not in all_names:
            raise ValueError(
                f"monitor: expected one of {sorted(all_names)}, got {name!r}. For values of an "
                "evaluation pass eval_data and eval_step, or put an Evaluate hook before this one."
            )
