"""What a transformation says of itself: scalars in `optax.SnapshotState`."""

import jax
import jax.numpy as jnp
import optax

from functrain.common import _tree
from functrain.common._types import PyTree


def log_norm(name: str = "gradient_norm") -> optax.GradientTransformation:
    """Returns the transformation that logs the global norm of what passes it, and changes nothing.

    It is `optax.snapshot` of `optax.tree.norm`, but for a norm of NaN where nothing has passed
    yet, as under `optax.MultiSteps`. `train_step` logs all that `optax.snapshot` takes, as long
    as it is a scalar.

    Args:
      name: The name in the logs. What it is the norm of is told by its place in the chain: first,
        that of the gradients; behind `optax.clip_by_global_norm`, that of the clipped ones; last,
        that of the updates.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> tx = optax.chain(log_norm(), optax.clip_by_global_norm(1.0), log_norm("clipped"))
      >>> _, opt_state = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))
      >>> print(logged(opt_state))
      {'clipped': Array(1., dtype=float32), 'gradient_norm': Array(5., dtype=float32)}
    """
    snapshot = optax.snapshot(name, optax.tree.norm)

    def init(params: PyTree) -> PyTree:
        return jax.tree.map(lambda norm: jnp.full_like(norm, jnp.nan), snapshot.init(params))

    return optax.GradientTransformation(init, snapshot.update)


def logged(state: PyTree) -> dict[str, jax.Array]:
    """Returns the scalars that an optimizer says of itself, as `train_step` logs them.

    For steps of one's own, which are made of `update`.

    Args:
      state: A TrainState, or its `opt_state`: `optax.SnapshotState` is looked for, everywhere.

    Returns:
      The scalars by name: those of `log_norm`, `optax.snapshot`, `skip_non_finite` and
      `loss_scale`.

    Raises:
      ValueError: One name stands for two scalars.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from functrain import TrainState
      >>> from functrain.tx import skip_non_finite
      >>> tx = skip_non_finite(optax.sgd(0.1))
      >>> state = TrainState.create(params={"w": jnp.ones(2)}, tx=tx)
      >>> sorted(logged(state.apply_gradients({"w": jnp.array([1.0, jnp.nan])}, tx)))
      ['skipped', 'skipped_in_a_row']
    """
    said: dict[str, jax.Array] = {}
    for node in _tree.nodes(state, optax.SnapshotState):
        for name, value in node.measurement.items():
            if name in said:
                raise ValueError(
                    f"tx: expected a name for each number that it logs, got {name!r} twice. Name "
                    f"one otherwise, as in functrain.tx.log_norm('{name}_2')."
                )
            if jnp.shape(value) == () and _tree.is_array(value):
                said[name] = value
    return dict(sorted(said.items()))
