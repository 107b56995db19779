"""Checks before the first step, so that mistakes do not surface after an epoch of training."""

import re
from collections.abc import Sequence
from typing import Any

import jax

from functrain.checkpoint._checkpointer import Checkpointer
from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._types import PyTree, traits_of
from functrain.engine import _placement
from functrain.engine._guards import tracing_guards
from functrain.engine._programs import metric_names
from functrain.hooks._early_stopping import EarlyStopping
from functrain.hooks._evaluate import Evaluate
from functrain.hooks._logger import Logger
from functrain.hooks._profile import Profile
from functrain.hooks._ray import RayReport
from functrain.hooks._reduce_lr_on_plateau import ReduceLROnPlateau
from functrain.hooks._sample import Sample
from functrain.hooks._terminate_on_nan import TerminateOnNaN
from functrain.hooks._watchdog import Watchdog
from functrain.loop._arguments import RunArguments
from functrain.step._metered import MeteredStep

# Hooks whose values are known: an evaluation's, or none.
_KNOWN_HOOKS = (
    Evaluate,
    EarlyStopping,
    Logger,
    Profile,
    RayReport,
    Sample,
    TerminateOnNaN,
    Watchdog,
)


def look_ahead(
    state: PyTree,
    step: Any,
    arguments: RunArguments,
    hooks: Sequence[Any],
    checkpointer: Checkpointer | None,
) -> None:
    """Traces each evaluation with its first batch, and checks the names of values.

    Nothing is computed.

    Args:
      state: The state to train.
      step: The step that trains.
      arguments: The other arguments of the run.
      hooks: All hooks, in their order.
      checkpointer: The checkpointer of the run.

    Raises:
      ValueError: There is no data to evaluate on, an iterator is read twice, an evaluation is due
        by the clocks of several processes, or no log, metric or evaluation has the name of a
        monitored value. Monitored names are not checked if a hook is a function, which may add any
        value.
      TypeError: The value of a metric is not a scalar.
      Exception: Whatever tracing an evaluation raises.
    """
    # The checks trace with shapes only, without the shardings that explicit mesh axes require.
    can_trace = arguments.jit and not _placement.is_explicit(arguments.sharding)
    metrics = metric_names(step) if isinstance(step, MeteredStep) else frozenset[str]()
    names = {"loss", *metrics}
    # A step without metrics may report no loss, so its names are unknown here.
    names_of_epochs = set(names) if metrics else set[str]()
    is_population = traits_of(step).is_population
    read: list[Any] = [arguments.batches.data]
    monitored = []
    knows_all_names = True
    for hook in hooks:
        if isinstance(hook, Evaluate):
            evaluated = _check_evaluation(hook, state, read, can_trace=can_trace)
            # Others are due within epochs: names that clash are found when two are due together.
            if getattr(hook.every, "epochs", None):
                hook.require_new(evaluated, names_of_epochs)
                names_of_epochs |= evaluated
            names |= evaluated
        knows_all_names &= isinstance(hook, _KNOWN_HOOKS)
        if isinstance(hook, EarlyStopping):
            _check_monitor(hook, state, is_population=is_population)
            if knows_all_names and hook.monitor not in names:
                monitored.append(hook.monitor)
    monitor = _monitored_name(checkpointer, names, is_population=is_population)
    if monitor is not None and knows_all_names and monitor not in names:
        monitored.append(monitor)
    if monitored and can_trace:
        _require_logs(monitored, names, state, step, arguments)


def _monitored_name(checkpointer: Any, names: set[str], *, is_population: bool) -> str | None:
    """Returns the name of the value that a checkpointer monitors, without the number of a member.

    Raises ValueError if it monitors all members of a population together.
    """
    # What is not a checkpointer at all is refused elsewhere.
    monitor: str | None = getattr(checkpointer, "monitor", None)
    if monitor is None or not is_population:
        return monitor
    expected = f"the value of one member, such as '{monitor}/0'"
    advice = "functrain.population.select takes the best member of any checkpoint."
    require(monitor not in names, "monitor", expected, monitor, advice)
    return re.sub(r"/\d+$", "", monitor)


def _check_evaluation(
    hook: Evaluate, state: PyTree, read: list[Any], *, can_trace: bool
) -> set[str]:
    """Traces an evaluation; returns the names of its values, and adds its data to those read."""
    batches = hook.batches
    is_shared = batches.is_iterator and any(batches.data is data for data in read)
    expected = "an iterator that nothing else in this run reads"
    advice = "Each would get a part of the batches: pass data that can be iterated again."
    require(not is_shared, batches.name, expected, batches.data, advice)
    read.append(batches.data)
    if jax.process_count() > 1:
        # All processes must enter the evaluation after the same step, or they wait forever.
        has_clock = getattr(hook.every, "seconds", None) is not None
        expected = "functrain.every(steps=...) or epochs= in several processes, whose clocks differ"
        require(not has_clock, "every", expected, hook.every)
    return {hook.prefix + name for name in hook.evaluation.trace(state, can_trace=can_trace)}


def _check_monitor(hook: EarlyStopping, state: PyTree, *, is_population: bool) -> None:
    """Raises ValueError for a hook that does not fit to the state.

    It watches each member although there is no population, or one value although there is one; or
    it lowers a learning rate that the state does not have.
    """
    expected = "a hook that watches one value, such as functrain.hooks.EarlyStopping"
    if is_population:
        expected = "a hook that watches each member, such as functrain.population.EarlyStopping"
    require(hook.of_members == is_population, "hooks", expected, hook)
    if isinstance(hook, ReduceLROnPlateau):
        hook.require_rates(state)


def _require_logs(
    monitored: Sequence[str], names: set[str], state: PyTree, step: Any, arguments: RunArguments
) -> None:
    """Raises ValueError if a monitored value is not among the logs of the step, either."""
    # An iterator's first batch is unknown: taking it here would take it from the training.
    shapes = arguments.batches.known_shapes()
    if not shapes:
        return
    abstract_state = _placement.abstract_on_mesh(state, None)
    carry = jax.eval_shape(traits_of(step).wrap_state, abstract_state)
    with tracing_guards():
        logs = jax.eval_shape(step, carry, _tree.shapes(shapes[0]))[1]
    all_names = names | {path for path, _ in _tree.leaves_with_path(logs)}
    advice = (
        "For values of an evaluation pass eval_data and eval_step, or put an Evaluate hook before "
        "this one."
    )
    for name in monitored:
        require(name in all_names, "monitor", f"one of {sorted(all_names)}", name, advice)
