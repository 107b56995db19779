"""What is looked at before the first step, so that no epoch is trained in vain."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from functrain.checkpoint import Checkpointer
from functrain.common import _tree
from functrain.common._types import PyTree
from functrain.data._sources import Source
from functrain.engine._guards import guarded
from functrain.engine._placement import batch_sharding, require_same_run
from functrain.engine._programs import cached
from functrain.hooks._csv import CSVLogger
from functrain.hooks._early_stopping import EarlyStopping
from functrain.hooks._evaluate import Evaluate
from functrain.hooks._logger import Logger
from functrain.hooks._profile import Profile
from functrain.hooks._sample import Sample
from functrain.hooks._terminate_on_nan import TerminateOnNaN
from functrain.loop._require import require_batches, require_own_data_wanted
from functrain.step._metered import MeteredStep

_OF_MEMBERS = {
    True: "hooks: expected functrain.population.EarlyStopping, which stops each member by itself, "
    "got functrain.hooks.EarlyStopping, which watches one value.",
    False: "hooks: expected functrain.hooks.EarlyStopping, got that of a population. The step of "
    "one is functrain.population.step(step).",
}
_ADD_NOTHING = (CSVLogger, EarlyStopping, Logger, Profile, Sample, TerminateOnNaN)


def look_ahead(
    state: PyTree,
    step: Any,
    data: Any,
    hooks: Sequence[Any],
    checkpointer: Checkpointer | None,
    *,
    traces: bool,
) -> None:
    """Traces each evaluation with its first batch, and asks for the values that are monitored.

    Nothing is computed. Of a pass over data that cannot be sought the first batch is fetched, and
    the first evaluation goes on with that pass.

    Args:
      state: What is to be trained.
      step: The step that trains.
      data: What it is trained on.
      hooks: All of them, in their order.
      checkpointer: That of the run.
      traces: Whether steps may be traced: they are compiled, and lie on no mesh with explicit axes.

    Raises:
      ValueError: There is nothing to evaluate on; or nobody provides a value that is monitored,
        as far as that is known: a function among the hooks may add any.
      TypeError: A metric's value is no scalar. And whatever tracing an evaluation raises.
    """
    like = functools.cache(lambda: jax.eval_shape(_tree.copy, state))  # most fits need none
    names = {"loss", *(_metric_names(step) if isinstance(step, MeteredStep) else ())}
    known = True  # that hooks add nothing else
    missing: dict[str, str] = {}  # the argument that each was given as
    is_population = getattr(step, "is_population", False)
    for hook in hooks:
        if isinstance(hook, Evaluate):
            _require_evaluation(like, hook, traces)
            names |= {hook.prefix + name for name in _metric_names(hook.step)}
        known &= isinstance(hook, (Evaluate, *_ADD_NOTHING))
        if isinstance(hook, EarlyStopping) and known:
            if hook.of_members != is_population:
                raise ValueError(_OF_MEMBERS[is_population])
            if hook.monitor not in names:
                missing.setdefault(hook.monitor, "monitor")
    best = getattr(checkpointer, "monitor", None)  # what is no checkpointer is refused elsewhere
    if best in names and is_population:
        raise ValueError(
            f"best: expected None, or the value of one member, such as '{best}/0', got {best!r}, "
            "of which each member of a population has one. functrain.population.select takes the "
            "best member of any checkpoint."
        )
    best = _of_one(best) if is_population and best is not None else best
    if best is not None and known and best not in names:
        missing.setdefault(best, "best")
    if missing and traces:
        _require_logs(missing, names, like, step, data)


def _of_one(name: str) -> str:
    """Returns the name of a value whose member is named as well: loss of loss/3."""
    whole, _, number = name.rpartition("/")
    return whole if number.isdecimal() else name


def _metric_names(step: MeteredStep) -> frozenset[str]:
    names: frozenset[str] = cached(
        step, "metric names", lambda get: functools.cache(lambda: _traced_names(get()))
    )()
    return names


def _traced_names(step: MeteredStep) -> frozenset[str]:
    with guarded(step):
        values = jax.eval_shape(step.metrics.compute, step.metrics.init())
    _tree.check_scalars(values)
    return frozenset(path for path, _ in _tree.leaves_with_path(values))


def _require_evaluation(like: Callable[[], PyTree], hook: Evaluate, traces: bool) -> None:
    """Raises now what the evaluation would raise after an epoch."""
    require_same_run(hook.source, batch_sharding(hook.how["sharding"]), fuse=hook.how["fuse"])
    require_own_data_wanted(hook.step, hook.source)
    batch = hook.source.look()
    require_batches(int(batch is not None), name=hook.source.name)
    if not traces or not hook.how["jit"]:
        return
    shapes = [_tree.shapes(batch)]
    if hook.how["sharding"] is not None:
        # A step may divide batches itself, as with jax.shard_map, and fail at a smaller last one.
        others = map(_tree.shapes, hook.source.specs())
        shapes += [other for other in others if other != shapes[0]]
    try:
        for shape in shapes:
            with guarded(hook.step):
                jax.eval_shape(hook.step, jax.eval_shape(hook.step.start, like()), shape)
    except Exception as error:
        error.add_note(f"This came from evaluating {hook.source.name}, before the first step.")
        raise


def _require_logs(
    missing: dict[str, str], names: set[str], like: Callable[[], PyTree], step: Any, data: Any
) -> None:
    """Looks for values among the logs of the step, where its first batch is known."""
    batch = next(Source(data).specs(), None)
    if batch is None:
        return
    carry = jax.eval_shape(step.start, like()) if isinstance(step, MeteredStep) else like()
    with guarded(step):
        logs = jax.eval_shape(step, carry, _tree.shapes(batch))[1]
    found = names | {path for path, _ in _tree.leaves_with_path(logs)}
    for name, argument in missing.items():
        if name not in found:
            raise ValueError(
                f"{argument}: expected one of {sorted(found)}, got {name!r}. Values of an "
                "evaluation need eval_data and eval_step, or an Evaluate hook that comes before."
            )
