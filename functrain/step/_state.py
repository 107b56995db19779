"""The state that training carries from step to step."""

import zlib
from typing import Any, Self, cast

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

    Functions (the model, the optimizer) are not part of it; the step closes over them. So a state
    can be copied, donated, vmapped and saved directly. ``==`` compares the identity of objects;
    to compare values, use `chex.assert_trees_all_equal` or `jax.tree.map`.

    Attributes:
      step: `i32[]`, steps taken so far, strongly typed.
      params: The arrays that the optimizer trains.
      model_state: Non-trainable collections: batch statistics, Keras seed counters, frozen
        weights.
      opt_state: The state of the optax transformation.
      rng: `key[]`, or None. A step uses the key ``fold_in(rng, step)``, so `rng` itself never
        changes. None is not a leaf, and losses are called with ``rng=None``.

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

    def __init_subclass__(cls, **options: Any) -> None:
        # flax makes a dataclass of each subclass. By default, that would replace `__eq__`,
        # `__hash__` and `__repr__` by functions that compare and print all arrays.
        options = {"eq": False, "repr": False, **options}
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call]  # flax has no types

    def __repr__(self) -> str:
        # Subclasses may have further fields.
        names = [name for name in self.__dataclass_fields__ if name != "step"]
        parts = [f"{name}={_repr.brief(getattr(self, name))}" for name in names]
        is_number = _tree.is_readable(self.step) and not self.step.shape
        step = str(self.step) if is_number else _repr.brief(self.step)
        return f"{type(self).__name__}(step={step}, {', '.join(parts)})"

    @classmethod
    def create(
        cls,
        *,
        params: PyTree,
        tx: optax.GradientTransformation,
        model_state: PyTree = (),
        rng: jax.Array | None = None,
        **fields: Any,
    ) -> Self:
        """Returns the state before the first step.

        Args:
          params: Pytree of floating-point arrays. Copied: the caller's arrays stay alive when
            the state is donated.
          tx: The optimizer; its `init` makes `opt_state`.
          model_state: Pytree of arrays, copied as well.
          rng: A typed key `key[]` from `jax.random.key`, or None for no randomness.
          **fields: The fields that a subclass adds, pytrees of arrays. They are copied as well,
            except for those that are not part of the pytree.

        Raises:
          TypeError: `tx` is not an optax transformation, `rng` is not a single typed key, `params`
            has a leaf that cannot be trained, a leaf is not an array, or `fields` are not those of
            the class.
          ValueError: A leaf has integers that jax would truncate to 32 bits.
        """
        check_rng(rng)
        check_tx(tx)
        params = _tree.copy(params)
        # For a complex array, jax returns the conjugate of the direction in which the loss grows: a
        # step against it, as optax takes, goes uphill in the imaginary part.
        advice = (
            "The optimizer trains all params. Put other arrays into model_state; train a complex "
            "array as two, its real and its imaginary part."
        )
        wrong = _tree.format_leaves(params, lambda x: not jnp.issubdtype(x.dtype, jnp.floating))
        require_no_problems("params", wrong, "floating-point arrays", advice, error=TypeError)
        state = cls(
            step=jnp.zeros((), jnp.int32),
            params=(),
            model_state=model_state,
            opt_state=tx.init(params),
            rng=rng,
            **fields,
        )
        # An init may keep the params themselves, or one array twice. A buffer that two leaves share
        # cannot be donated.
        created: Self = _tree.copy(state).replace(params=params)
        return created

    def apply_gradients(
        self, grads: PyTree, tx: optax.GradientTransformation, **extra_args: Any
    ) -> Self:
        """Returns the state after one optimizer update.

        Args:
          grads: Gradients, with the structure of `params`.
          tx: The optimizer the state was created with.
          **extra_args: Further arguments for the optimizer's `update` (`value`, `value_fn`,
            `grad_fn`, ...). It gets those that it has parameters for.

        Returns:
          The state with new `params` and `opt_state`, and `step` one higher.

        Raises:
          ValueError: `opt_state` belongs to another optimizer.
        """
        _check_opt_state(self.opt_state, self.params, tx)
        # `optax.lookahead` takes the gradients of the fast params only.
        if isinstance(grads, optax.LookaheadParams):
            grads = grads.fast
        update = with_any_extra_args(tx).update
        # The name by which profiles and `functrain.inspect.cost` show these operations.
        with jax.named_scope("optimizer"):
            updates, opt_state = update(grads, self.opt_state, self.params, **extra_args)
            params = optax.apply_updates(self.params, updates)
            step = self.step + jnp.ones((), self.step.dtype)
        return self.replace(step=step, params=params, opt_state=opt_state)


def step_key(state: TrainState, name: str) -> jax.Array:
    """Returns a key for the random numbers of one step that are drawn outside of the loss.

    It depends on the state's `rng`, its `step` and the name alone: a resumed run draws the same
    numbers, and another name gives others. The loss has a key of its own.

    Args:
      state: The state before the step.
      name: The purpose of the numbers, such as ``"mixup"``.

    Returns:
      A key, `key[]`.

    Raises:
      TypeError: The state has no `rng`.

    Examples:
      >>> import jax, optax
      >>> tx, rng = optax.sgd(0.1), jax.random.key(0)
      >>> state = TrainState.create(params={}, tx=tx, rng=rng)
      >>> noise = jax.random.normal(step_key(state, "noise"), (4, 8))
    """
    require_key("state.rng", state.rng)
    key = jax.random.fold_in(cast(jax.Array, state.rng), state.step)
    # Models fold in small numbers, a checksum is a large one.
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def check_rng(rng: Any) -> None:
    """Raises TypeError unless `rng` is a single typed key or None."""
    if rng is not None:
        require_key("rng", rng)


def require_key(name: str, key: Any) -> None:
    """Raises TypeError unless an argument is a single typed key."""
    advice = (
        "Make it with jax.random.key(seed), or from an old-style key with jax.random.wrap_key_data."
    )
    is_one_key = _tree.is_key(key) and key.shape == ()
    require(is_one_key, name, "one typed key, key[]", key, advice, error=TypeError)


def check_tx(tx: Any) -> None:
    """Raises TypeError unless `tx` is an optax transformation."""
    # Checked by its methods, not by its class: any pair of such functions works.
    is_tx = callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))
    expected = "an optax transformation, such as optax.adam(1e-3)"
    advice = "Call the function that makes one; for a Keras optimizer, pass bridge.optimizer(tx)."
    require(is_tx, "tx", expected, tx, advice, error=TypeError)


def _check_opt_state(opt_state: PyTree, params: PyTree, tx: optax.GradientTransformation) -> None:
    """Raises ValueError if `opt_state` belongs to another optimizer.

    Compares the paths and shapes of its leaves. Dtypes may differ, since moments may be wider than
    params that were cast. Container types are not compared: they may hold functions, which never
    compare equal.
    """
    # jax caches this trace: once for each tx and each structure of params.
    try:
        expected_state = jax.eval_shape(tx.init, params)
    except Exception:
        # An init that reads values cannot be traced, so there is nothing to compare with.
        return
    expected, got = (
        {path: list(jnp.shape(x)) for path, x in _tree.leaves_with_path(tree)}
        for tree in (expected_state, opt_state)
    )
    lines = _tree.spec_differences(expected, got)
    advice = (
        "Pass the tx that the state was created with; to continue with another one, "
        "state.replace(opt_state=tx.init(state.params))."
    )
    require_no_problems("opt_state", lines, "leaves of the shapes that this tx makes", advice)
