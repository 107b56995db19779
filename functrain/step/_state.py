"""What training carries from step to step."""

from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import optax

from functrain.common import _tree
from functrain.common._types import PyTree


class TrainState(flax.struct.PyTreeNode):
    """Everything a step changes, and nothing else: a frozen pytree, every leaf an array.

    Functions (the model, the optimizer) are not in it; the step closes over them. So a state can
    be copied, donated, vmapped, saved and compared as it stands.

    Attributes:
      step: `i32[]`, steps taken so far, strongly typed.
      params: What the optimizer trains.
      model_state: Non-trainable collections: batch statistics, Keras seed counters, frozen
        weights.
      opt_state: The state of the optax transformation.
      rng: `key[]`, or None. The randomness of a step is ``fold_in(rng, step)``, so `rng` itself
        never changes; with None there is no leaf, and losses are called with ``rng=None``.

    Examples:
      >>> import jax, jax.numpy as jnp, optax
      >>> tx = optax.sgd(0.1)
      >>> state = TrainState.create(params={"w": jnp.ones(3)}, tx=tx, rng=jax.random.key(0))
      >>> state = state.apply_gradients({"w": jnp.ones(3)}, tx)
      >>> print(state.step, state.params["w"])
      1 [0.9 0.9 0.9]
    """

    step: jax.Array
    params: PyTree
    model_state: PyTree
    opt_state: PyTree
    rng: jax.Array | None

    @classmethod
    def create(
        cls,
        *,
        params: PyTree,
        tx: optax.GradientTransformation,
        model_state: PyTree = (),
        rng: jax.Array | None = None,
    ) -> Self:
        """Returns the state before the first step.

        Args:
          params: Pytree of floating-point arrays. Copied: the caller's arrays stay alive when
            the state is donated.
          tx: The optimizer; its `init` makes `opt_state`.
          model_state: Pytree of arrays, copied as well.
          rng: A typed key `key[]` from `jax.random.key`, or None for no randomness.

        Raises:
          TypeError: `tx` is no optax transformation, `rng` is not a single typed key, `params`
            holds something that cannot be trained, or a leaf is no array.
        """
        if rng is not None and not (_tree.is_key(rng) and rng.shape == ()):
            raise TypeError(
                f"rng: expected one typed key, key[], got {_tree.spec(rng)}. "
                "Make it with jax.random.key(seed); jax.random.wrap_key_data converts an old "
                "uint32[2] key."
            )
        check_tx(tx)
        params = _tree.copy(params)
        for path, leaf in _tree.leaves_with_path(params):
            if not jnp.issubdtype(leaf.dtype, jnp.inexact):
                raise TypeError(
                    f"params/{path}: expected a floating-point array, got {_tree.spec(leaf)}. "
                    "Params are what the optimizer trains; put the rest into model_state."
                )
        return cls(
            step=jnp.zeros((), jnp.int32),
            params=params,
            model_state=_tree.copy(model_state),
            opt_state=_tree.copy(tx.init(params)),
            rng=_tree.copy(rng),
        )

    def apply_gradients(
        self, grads: PyTree, tx: optax.GradientTransformation, **extra_args: Any
    ) -> Self:
        """Returns the state after one optimizer update.

        Args:
          grads: Gradients, with the structure of `params`.
          tx: The optimizer the state was created with.
          **extra_args: What the optimizer's `update` takes beyond gradients and params (`value`,
            `value_fn`, ...); ignored by those that take nothing.

        Returns:
          The state with new `params` and `opt_state`, and `step` one higher.
        """
        update = optax.with_extra_args_support(tx).update
        updates, opt_state = update(grads, self.opt_state, self.params, **extra_args)
        return self.replace(
            step=self.step + jnp.ones((), self.step.dtype),
            params=optax.apply_updates(self.params, updates),
            opt_state=opt_state,
        )


def check_tx(tx: Any) -> None:
    """Refuses what is no optax transformation."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        hint = " Take bridge.optimizer(tx)." if hasattr(tx, "stateless_apply") else ""
        raise TypeError(
            f"tx: expected an optax transformation, such as optax.adam(1e-3), got {tx!r}.{hint}"
        )
