"""What is looked at before the first step, so that no epoch is trained in vain."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from functrain.checkpoint import Checkpointer
from functrain.common import _tree
from functrain.common._types import PyTree, traits_of
from functrain.data._batches import Batches
from functrain.engine._guards import tracing_guards
from functrain.engine._placement import batch_sharding, require_same_run
from functrain.hooks._early_stopping import EarlyStopping
from functrain.hooks._evaluate import Evaluate
from functrain.hooks._logger import Logger
from functrain.hooks._profile import Profile
from functrain.hooks._sample import Sample
from functrain.hooks._terminate_on_nan import TerminateOnNaN
from functrain.loop._require import require_batches
from functrain.step._metered import MeteredStep

_OF_MEMBERS = {
    True: "hooks: expected functrain.population.EarlyStopping, which stops each member by itself, "
    "got functrain.hooks.EarlyStopping, which watches one value.",
    False: "hooks: expected functrain.hooks.EarlyStopping, got that of a population. The step of "
    "one is functrain.population.step(step).",
}
_ADD_NOTHING = (EarlyStopping, Logger, Profile, Sample, TerminateOnNaN)


def look_ahead(
    state: PyTree,
    step: Any,
    batches: Batches,
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
      batches: What it is trained on.
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
    is_population = traits_of(step).is_population
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
    if best is not None and is_population:
        best = re.sub(r"/\d+$", "", best)  # the value of one member, such as loss/3
    if best is not None and known and best not in names:
        missing.setdefault(best, "best")
    if missing and traces:
        _require_logs(missing, names, like, step, batches)


def _metric_names(step: MeteredStep) -> set[str]:
    with tracing_guards(step):
        values = jax.eval_shape(step.metrics.compute, step.metrics.init())
    _tree.require_scalars(values)
    return {path for path, _ in _tree.leaves_with_path(values)}


def _require_evaluation(like: Callable[[], PyTree], hook: Evaluate, traces: bool) -> None:
    """Raises now what the evaluation would raise after an epoch."""
    require_same_run(hook.batches, batch_sharding(hook.how["sharding"]), fuse=hook.how["fuse"])
    hook.step.require_data(hook.batches.data, hook.batches.name)
    batch = hook.batches.first()
    require_batches(int(batch is not None), name=hook.batches.name)
    if not traces or not hook.how["jit"]:
        return
    shapes = [_tree.shapes(batch)]
    if hook.how["sharding"] is not None:
        # A step may divide batches itself, as with jax.shard_map, and fail at a smaller last one.
        others = map(_tree.shapes, hook.batches.known_shapes())
        shapes += [other for other in others if other != shapes[0]]
    try:
        for shape in shapes:
            with tracing_guards(hook.step):
                jax.eval_shape(hook.step, jax.eval_shape(hook.step.start, like()), shape)
    except Exception as error:
        error.add_note(f"This came from evaluating {hook.batches.name}, before the first step.")
        raise


def _require_logs(
    missing: dict[str, str],
    names: set[str],
    like: Callable[[], PyTree],
    step: Any,
    batches: Batches,
) -> None:
    """Looks for values among the logs of the step, where its first batch is known."""
    shapes = batches.known_shapes()
    if not shapes:
        return
    carry = jax.eval_shape(traits_of(step).wrap_state, like())
    with tracing_guards(step):
        logs = jax.eval_shape(step, carry, _tree.shapes(shapes[0]))[1]
    found = names | {path for path, _ in _tree.leaves_with_path(logs)}
    for name, argument in missing.items():
        if name not in found:
            raise ValueError(
                f"{argument}: expected one of {sorted(found)}, got {name!r}. Values of an "
                "evaluation need eval_data and eval_step, or an Evaluate hook that comes before."
            )
