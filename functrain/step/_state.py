"""What training carries from step to step."""

from typing import Any, Self

import flax.struct
import jax
import jax.numpy as jnp
import optax

from functrain.common import _repr, _tree
from functrain.common._checks import require, require_no_problems
from functrain.common._types import PyTree
from functrain.tx._extra_args import with_any_extra_args


class TrainState(flax.struct.PyTreeNode, eq=False):
    """Everything a step changes, and nothing else: a frozen pytree, every leaf an array.

    Functions (the model, the optimizer) are not in it; the step closes over them. So a state can
    be copied, donated, vmapped and saved as it stands. ``==`` asks whether two are one object;
    values are compared leaf by leaf, with `chex.assert_trees_all_equal` or `jax.tree.map`.

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

    def __repr__(self) -> str:
        parts = {name: _repr.brief(getattr(self, name)) for name in self.__dataclass_fields__}
        parts["step"] = _repr.format_scalar(self.step)
        return f"{type(self).__name__}({', '.join(f'{n}={text}' for n, text in parts.items())})"

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
          ValueError: A leaf holds integers that jax would cut to 32 bits.
        """
        check_rng(rng)
        check_tx(tx)
        params = _tree.copy(params)
        for path, leaf in _tree.leaves_with_path(params):
            advice = "Params are what the optimizer trains; put the rest into model_state."
            is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
            expected = "a floating-point array"
            require(is_float, f"params/{path}", expected, leaf, advice, error=TypeError)
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
            `value_fn`, `grad_fn`, ...). It is given those that it has parameters for.

        Returns:
          The state with new `params` and `opt_state`, and `step` one higher.

        Raises:
          ValueError: `opt_state` is another optimizer's.
        """
        _check_opt_state(self.opt_state, self.params, tx)
        update = with_any_extra_args(tx).update
        updates, opt_state = update(grads, self.opt_state, self.params, **extra_args)
        return self.replace(
            step=self.step + jnp.ones((), self.step.dtype),
            params=optax.apply_updates(self.params, updates),
            opt_state=opt_state,
        )


def check_rng(rng: Any) -> None:
    """Refuses what is neither a key nor None."""
    advice = "Make it with jax.random.key(seed), or of an old key with jax.random.wrap_key_data."
    is_one_key = _tree.is_key(rng) and rng.shape == ()
    require(rng is None or is_one_key, "rng", "one typed key, key[]", rng, advice, error=TypeError)


def check_tx(tx: Any) -> None:
    """Refuses what is no optax transformation."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        hint = f" Call it: {_repr.name(tx)}(...)." if callable(tx) else ""
        hint = " Take bridge.optimizer(tx)." if hasattr(tx, "stateless_apply") else hint
        raise TypeError(
            "tx: expected an optax transformation, such as optax.adam(1e-3), got "
            f"{_repr.brief(tx)}.{hint}"
        )


def _check_opt_state(opt_state: PyTree, params: PyTree, tx: optax.GradientTransformation) -> None:
    """Refuses the state of another optimizer, by path, shape and kind of number of its leaves.

    Not by dtype: moments may be wider than params that were cast. Not by type of container: they
    may hold functions, which equal nothing.
    """
    try:
        made = jax.eval_shape(tx.init, params)  # traced once for each tx and kind of params
    except Exception:  # an init that reads values cannot be traced: nothing to compare with
        return
    lines = _tree.spec_differences(_kinds(made), _kinds(opt_state))
    advice = (
        "Take the tx that the state was created with; to continue with another one, "
        "state.replace(opt_state=tx.init(state.params))."
    )
    require_no_problems("opt_state", lines, "the leaves that this tx makes of params", advice)


def _kinds(tree: PyTree) -> dict[str, str]:
    kinds = {"b": "bool", "i": "int", "u": "int", "c": "complex"}
    return {
        path: f"{kinds.get(jnp.result_type(x).kind, 'float')}[{', '.join(map(str, jnp.shape(x)))}]"
        for path, x in _tree.leaves_with_path(tree)
        if not _tree.is_key(x)
    }
