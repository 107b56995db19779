"""Scalars that transformations log, which they keep in `optax.SnapshotState`."""

import itertools

import jax
import jax.numpy as jnp
import optax

from functrain.common import _tree
from functrain.common._checks import require, require_integer
from functrain.common._log_values import LastValue
from functrain.common._types import PyTree

# The states that keep the rate of the last update as `learning_rate`.
_LINE_SEARCHES = (optax.ScaleByZoomLinesearchState, optax.ScaleByBacktrackingLinesearchState)


def log_norm(
    name: str = "gradient_norm", *, depth: int | None = None
) -> optax.GradientTransformation:
    """Returns a transformation that logs the global norm of the updates and changes nothing.

    It is `optax.snapshot` of `optax.tree.norm`, computed in float32 or wider, except that the norm
    is 0 until the first update, which `optax.MultiSteps` delays. `train_step` logs every scalar
    that an `optax.snapshot` in the optimizer measures.

    Args:
      name: The name in the logs. The position in the chain determines whose norm is logged: first
        in the chain, that of the gradients; after `optax.clip_by_global_norm`, that of the clipped
        gradients; last, that of the updates.
      depth: Also log the norm of each part of the params, down to this number of names in their
        paths. With 1, the kernel and the bias of a dense layer share ``gradient_norm/dense``; with
        2 they have norms of their own, ``gradient_norm/dense/kernel``.

    Raises:
      ValueError: `depth` is below 1.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> tx = optax.chain(log_norm(), optax.clip_by_global_norm(1.0), log_norm("clipped"))
      >>> _, opt_state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
      >>> print(logged(opt_state))
      {'clipped': Array(1., dtype=float32), 'gradient_norm': Array(5., dtype=float32)}
      >>> gradients = {"dense": {"kernel": jnp.full(4, 2.0), "bias": jnp.full(1, 3.0)}}
      >>> tx = log_norm("norm", depth=1)
      >>> _, opt_state = tx.update(gradients, tx.init(gradients))
      >>> print(logged(opt_state))
      {'norm': Array(5., dtype=float32), 'norm/dense': Array(5., dtype=float32)}
    """
    if depth is not None:
        require_integer("depth", depth)

    def norms(updates: PyTree) -> dict[str, jax.Array]:
        # Squares overflow in float16, and their sums stop growing in bfloat16.
        updates = jax.tree.map(lambda x: _tree.at_least_float32(jnp.asarray(x)), updates)
        measured = {name: optax.tree.norm(updates)}
        for part, leaves in _parts(updates, depth).items():
            measured[f"{name}/{part}"] = optax.tree.norm(leaves)
        return measured

    def init(params: PyTree) -> PyTree:
        # Not a measurement of the params, which `optax.snapshot` starts with.
        return optax.SnapshotState(jax.tree.map(jnp.zeros_like, norms(params)))

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return updates, optax.SnapshotState(norms(updates))

    return optax.GradientTransformation(init, update)


def _parts(tree: PyTree, depth: int | None) -> dict[str, list[jax.Array]]:
    """Returns the leaves of a tree by the first `depth` names of their paths; none without."""
    parts: dict[str, list[jax.Array]] = {}
    for path, leaf in _tree.leaves_with_path(tree) if depth is not None else ():
        parts.setdefault("/".join(path.split("/")[:depth]), []).append(leaf)
    return parts


def logged(state: PyTree) -> dict[str, jax.Array]:
    """Returns the scalars that an optimizer logs, as `train_step` does.

    For custom steps that call `update`.

    Args:
      state: A TrainState, or its `opt_state`.

    Returns:
      The scalars by name: those of `log_norm`, `optax.snapshot`, `skip_non_finite` and
      `loss_scale`, and the learning rates of the last update that `optax.inject_hyperparams` or a
      line search keeps: ``learning_rate``, in `param_groups` ``<group>/learning_rate``.

    Raises:
      ValueError: Two scalars have the same name.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from functrain import TrainState
      >>> from functrain.tx import skip_non_finite
      >>> tx = skip_non_finite(optax.sgd(0.1))
      >>> state = TrainState.create(params={"w": jnp.ones(2)}, tx=tx)
      >>> sorted(logged(state.apply_gradients({"w": jnp.array([1.0, jnp.nan])}, tx)))
      ['skipped', 'skipped_in_a_row']
    """
    scalars = _applied_rates(getattr(state, "opt_state", state))
    for node in _tree.nodes(state, optax.SnapshotState):
        for name, value in node.measurement.items():
            advice = f"Rename one, as in functrain.tx.log_norm('{name}_2')."
            require(name not in scalars, "tx", "a unique name for each scalar", name, advice)
            # `optax.snapshot` may also measure arrays with axes, which a log cannot hold.
            if jnp.shape(value) == () and _tree.is_array(value):
                scalars[name] = value
    return dict(sorted(scalars.items()))


def _applied_rates(opt_state: PyTree) -> dict[str, jax.Array]:
    """Returns the learning rates of the last update, as far as the state keeps them."""
    rates: dict[str, list[jax.Array]] = {}
    for path, x in _tree.leaves_with_path(opt_state, lambda x: isinstance(x, _LINE_SEARCHES)):
        keys = path.split("/")
        if isinstance(x, _LINE_SEARCHES):
            rates.setdefault(_log_name(keys), []).append(x.learning_rate)
        elif _is_injected_rate(keys):
            rates.setdefault(_log_name(keys), []).append(x)
    # Two rates with one name, as of a chain, cannot be told apart: neither is logged.
    return {name: jnp.asarray(x[0], jnp.float32) for name, x in rates.items() if len(x) == 1}


def _is_injected_rate(path: list[str]) -> bool:
    """Returns True for the path of a rate that an optimizer keeps as a hyperparameter."""
    # `inject_hyperparams` stores the values that an update used in the state after it, as the
    # optimizers of `bridge` do. Elsewhere `learning_rate` may be the name of a param, whose moments
    # have this name, too.
    return path[-1] == "learning_rate" and path[-2:-1] in (["hyperparams"], ["scalars"])


def _log_name(path: list[str]) -> str:
    """Returns the log name of a rate, with the names of the groups it belongs to."""
    # `optax.partition` keeps the state of each group under inner_states/<group>.
    groups = [name for parent, name in itertools.pairwise(path) if parent == "inner_states"]
    return LastValue("/".join([*groups, "learning_rate"]))
