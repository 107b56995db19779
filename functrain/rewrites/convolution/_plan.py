"""The choice of a method for a convolution, by the times that a cost model estimates."""

import functools
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from functrain.rewrites.convolution import depthwise, patches, reductions, shifts, xla
from functrain.rewrites.convolution._description import Convolution
from functrain.rewrites.convolution._method import Method

METHODS: tuple[Method, ...] = (
    xla.xla,
    patches.product,
    patches.patches,
    patches.blocked_patches,
    shifts.shifts,
    depthwise.depthwise,
    depthwise.depthwise_gradient,
    reductions.trimmed,
    reductions.swapped,
    reductions.phases,
    reductions.planes,
    reductions.groups,
)
# XLA's own kernel is used unless the estimate of another plan is below this part of its estimate.
XLA_MARGIN = 0.9
# How deep reductions are nested: a plane of a transposed convolution has phases.
MAX_DEPTH = 2


class Plan(NamedTuple):
    """A way to compute a convolution, with the estimate of its time.

    Attributes:
      method: The method.
      seconds: The estimate, on the machine on which the weights were fitted.
      parts: The plans of the convolutions that the method needs.
    """

    method: Method
    seconds: float
    parts: Mapping[Convolution, "Plan"]

    @property
    def name(self) -> str:
        """Returns the names of the methods, such as ``phases(xla)``."""
        names = dict.fromkeys(plan.name for plan in self.parts.values())
        return f"{self.method.name}({', '.join(names)})" if names else self.method.name

    def lower(self, conv: Convolution, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """Computes the convolution, all arrays in the canonical layout."""

        def convolve(part: Convolution, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
            return self.parts[part].lower(part, lhs, rhs)

        return self.method.lower(conv, lhs, rhs, convolve)


def best_plan(conv: Convolution, depth: int = MAX_DEPTH) -> Plan | None:
    """Returns the plan with the lowest estimate, or None if no method applies."""
    plans = all_plans(conv, depth)
    own = next((plan for plan in plans if plan.method is xla.xla), None)
    if own and plans[0].seconds > XLA_MARGIN * own.seconds:
        return own
    return plans[0] if plans else None


@functools.lru_cache(maxsize=4096)
def all_plans(conv: Convolution, depth: int = MAX_DEPTH) -> tuple[Plan, ...]:
    """Returns a plan for each method that applies, the lowest estimate first."""
    # The other methods then see what is left.
    methods = [reductions.trimmed] if reductions.trimmed.applies(conv) else METHODS
    plans = []
    for method in methods:
        if method.applies(conv) and (plan := _make_plan(method, conv, depth)):
            plans.append(plan)
    return tuple(sorted(plans, key=lambda plan: plan.seconds))


def _make_plan(method: Method, conv: Convolution, depth: int) -> Plan | None:
    """Returns the plan by a method, or None if the parts cannot be computed."""
    # Trimming is no choice, so it does not count.
    part_depth = depth if method is reductions.trimmed else depth - 1
    parts: dict[Convolution, Plan] = {}
    counts: dict[Convolution, int] = {}
    for part, count in method.parts(conv):
        plan = best_plan(part, part_depth) if part_depth >= 0 else None
        if plan is None:
            return None
        parts[part] = plan
        counts[part] = counts.get(part, 0) + count
    seconds = sum(counts[part] * plan.seconds for part, plan in parts.items())
    return Plan(method, estimate(method, conv, seconds), parts)


def estimate(method: Method, conv: Convolution, parts: float = 0.0) -> float:
    """Returns the estimated seconds of a method whose parts take `parts` seconds."""
    if method is reductions.trimmed:
        return parts
    weights = _find_weights(weights_key(method.name, conv))
    features = {**method.features(conv), "parts": parts}
    return sum(weights[name] * value for name, value in features.items())


def _find_weights(key: str) -> dict[str, float]:
    """Returns the weights of a key, or of the most similar one: some kinds are too rare to fit."""
    for similar in (key, key.replace("narrow", "wide"), key.removesuffix("/gradient")):
        if similar in _weights():
            return _weights()[similar]
    return _weights()[similar.replace("narrow", "wide")]


def weights_key(name: str, conv: Convolution) -> str:
    """Returns the name of a method's weights for a convolution."""
    key = f"{name}/{'wide' if conv.dtype.itemsize >= 4 else 'narrow'}"
    if name == "xla":
        # XLA has a kernel for each of these kinds, and is slow if the window is the image.
        key += "/groups" if conv.groups > 1 else ""
        key += "/holes" if conv.has_holes else "/3d" if len(conv.image) > 2 else ""
        key += "/gradient" if math.prod(conv.window) > math.prod(conv.positions) else ""
    if name in ("product", "patches", "blocked_patches") and conv.is_batch_last:
        key += "/by_channel"
    return key


@functools.cache
def _weights() -> dict[str, dict[str, float]]:
    path = pathlib.Path(__file__).with_name("weights.json")
    weights: dict[str, Any] = json.loads(path.read_text())
    return weights["weights"]
