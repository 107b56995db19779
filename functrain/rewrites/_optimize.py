"""The entry points: `optimize` rewrites a function, `resolve_mode` says which rewrites apply."""

import functools
import os
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.extend.core import primitives

from functrain.common._platform import current_platform
from functrain.common._warnings import warn
from functrain.rewrites._pass import inline_calls, retype, rewrite_jaxpr
from functrain.rewrites._rewrite import Rewrite, RewriteError
from functrain.rewrites.argmax import argmax, argmin
from functrain.rewrites.broadcast_first import broadcast_first
from functrain.rewrites.canonical_conv import batch_groups, canonical_conv
from functrain.rewrites.dense_gradient import dense_gradient
from functrain.rewrites.depthwise_conv import depthwise_conv
from functrain.rewrites.dot_conv import dot_conv
from functrain.rewrites.few_features import few_features
from functrain.rewrites.grouped_conv import grouped_conv
from functrain.rewrites.label_pick import label_pick, label_pick_gradient
from functrain.rewrites.max_pool_gradient import max_pool_gradient
from functrain.rewrites.patch_conv import patch_conv
from functrain.rewrites.relu_gradient import bias_before_pooling, relu_before_pooling, relu_mask
from functrain.rewrites.summed_after import summed_after
from functrain.rewrites.swapped_conv import swapped_conv
from functrain.rewrites.unrolled_scan import unrolled_scan
from functrain.rewrites.volume_conv import volume_conv

Mode: TypeAlias = Literal["auto", "exact", "off"]
F = TypeVar("F", bound=Callable[..., Any])

# In order of precedence: the first rewrite that applies is used, and those after it also see the
# equations that it returns. So canonical_conv is behind all rules for convolutions that they may
# leave.
# volume_conv is behind patch_conv, which would otherwise see the 2-D convolutions that volume_conv
# returns for the gradient of weights, and take them for layers.
# unrolled_scan comes first, so that the others see the bodies of the scans.
REWRITES: tuple[Rewrite, ...] = (
    unrolled_scan,
    summed_after,
    dense_gradient,
    depthwise_conv,
    dot_conv,
    grouped_conv,
    swapped_conv,
    few_features,
    patch_conv,
    volume_conv,
    batch_groups,
    canonical_conv,
    max_pool_gradient,
    argmax,
    argmin,
    label_pick,
    label_pick_gradient,
    bias_before_pooling,
    relu_before_pooling,
    relu_mask,
    broadcast_first,
)


def optimize(fn: F, rewrites: Mode = "auto") -> F:
    """Returns the function with its slow operations rewritten for the platform it is compiled for.

    The result traces `fn` once per call and evaluates the rewritten jaxpr, so jit it, or call it
    inside a jitted function. Differentiate and `vmap` the function before, not after: rewrites
    apply only to the operations that they see.

    Args:
      fn: Any function from pytrees of arrays to pytrees of arrays. Bind arguments that are not
        arrays, such as flags or shapes, before: ``optimize(functools.partial(fn, training=True))``.
      rewrites: "auto" for all rewrites, "exact" for only those that keep every bit under `jit`,
        "off" for none; see `resolve_mode`.

    Returns:
      A function of the same arguments, keywords and results: structure, shapes, dtypes and weak
      types. A rewrite that fails is skipped with a warning.

    Raises:
      ValueError: `rewrites`, or FUNCTRAIN_REWRITES in the environment, is not one of the three.

    Examples:
      >>> import jax, jax.numpy as jnp
      >>> def fn(image, kernel):
      ...     return jax.lax.conv(image, kernel, (1, 1), "SAME")
      >>> image, kernel = jnp.ones((2, 3, 8, 8)), jnp.ones((4, 3, 3, 3))
      >>> print(jax.jit(optimize(fn))(image, kernel).shape)
      (2, 4, 8, 8)
    """
    if resolve_mode(rewrites, "cpu") == "off":
        return fn

    @functools.wraps(fn)
    def optimized(*args: Any, **kwargs: Any) -> Any:
        # Chosen for each program, since one may be compiled for a CPU and one for a GPU.
        platform = current_platform()
        chosen = resolve_mode(rewrites, platform)
        if chosen == "off":
            return fn(*args, **kwargs)
        closed, out_shapes = jax.make_jaxpr(fn, return_shape=True)(*args, **kwargs)
        closed, failures = rewrite_or_keep(closed, chosen, platform)
        for failure in failures:
            warn(
                f"{describe_failure(failure)} Please report it. "
                "FUNCTRAIN_REWRITES=off in the environment turns rewrites off.",
            )
        return evaluate(closed, out_shapes, (args, kwargs))

    return optimized  # type: ignore[return-value]  # wraps(F) is callable as F is


def evaluate(closed: Any, out_shapes: Any, args: Any) -> Any:
    """Returns the outputs of a jaxpr in the structure of `out_shapes`; `args` is any pytree."""
    run: Any = core.jaxpr_as_fun(closed)
    outs = run(*map(jnp.asarray, jax.tree.leaves(args)))
    # The jaxpr returns no weak types when it is evaluated outside of jit.
    outs = map(retype, map(jnp.asarray, outs), closed.out_avals)
    return jax.tree.unflatten(jax.tree.structure(out_shapes), outs)


def rewrite_or_keep(closed: Any, chosen: Mode, platform: str) -> tuple[Any, list[Exception]]:
    """Returns the rewritten jaxpr, and the errors of the rewrites that were skipped."""
    rules = rules_for(platform)
    failures: list[Exception] = []
    # A rewrite must never stop a training: each that fails is removed, and the pass runs again.
    while True:
        try:
            return _rewrite(closed, rules, platform, exact_only=chosen == "exact"), failures
        except RewriteError as error:
            rules = tuple(rule for rule in rules if rule is not error.rewrite)
            failures.append(error)
        except Exception as error:
            # The pass itself failed, so no rewrite can be used.
            return closed, [*failures, error]


def describe_failure(failure: Exception) -> str:
    """Returns a sentence about an error of `rewrite_or_keep`."""
    if isinstance(failure, RewriteError):
        return f"A rewrite failed and is skipped: {failure}"
    return f"The program could not be rewritten and stays as it is: {failure!r}."


def _rewrite(closed: Any, rules: tuple[Rewrite, ...], platform: str, *, exact_only: bool) -> Any:
    """Returns a jaxpr rewritten for a platform."""
    # The rules for CPUs were measured in one pass, with the calls as they are.
    if platform != "cpu":
        closed = rewrite_jaxpr(inline_calls(closed), rules, exact_only)
        # A scan whose loop was kept is smaller now, but it would not gain from being unrolled.
        rules = tuple(rule for rule in rules if rule.primitive is not primitives.scan_p)
    # For an accelerator this is a second pass: it also sees the equations of the first one.
    return rewrite_jaxpr(closed, rules, exact_only)


def rules_for(platform: str) -> tuple[Rewrite, ...]:
    """Returns the rewrites for programs on a platform, in order of precedence."""
    return tuple(rule for rule in REWRITES if platform in rule.platforms)


def resolve_mode(rewrites: str = "auto", platform: str | None = None) -> Mode:
    """Returns which rewrites apply to a program.

    Args:
      rewrites: The requested mode. FUNCTRAIN_REWRITES in the environment overrides it.
      platform: The platform that the program is compiled for: "cpu", "gpu" or "tpu". By default
        that of the program that is being traced, or else of the default device.

    Returns:
      The requested mode, or "off" for a platform for which there are no rewrites.

    Raises:
      ValueError: One of the two is not "auto", "exact" or "off".

    Examples:
      >>> resolve_mode("off")
      'off'
    """
    # An empty variable counts as not set.
    requested = os.environ.get("FUNCTRAIN_REWRITES") or rewrites
    for name, value in (("rewrites", rewrites), ("FUNCTRAIN_REWRITES", requested)):
        if value not in get_args(Mode):
            raise ValueError(f"{name}: expected 'auto', 'exact' or 'off', got {value!r}")
    return cast(Mode, requested) if rules_for(platform or current_platform()) else "off"
