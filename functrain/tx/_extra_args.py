"""Keywords for the updates of optax transformations, each of which takes others."""

from typing import Any

import optax

from functrain.common._arguments import parameters
from functrain.common._types import PyTree


def with_any_extra_args(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation with an update that takes any keyword, and uses those it knows.

    `optax.with_extra_args_support` does so for updates that take no keywords at all.
    """
    tx = optax.with_extra_args_support(tx)

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        named = parameters(tx.update)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values()):
            extra_args = {name: x for name, x in extra_args.items() if name in named}
        try:
            updated: tuple[PyTree, PyTree] = tx.update(updates, state, params, **extra_args)
            return updated
        except TypeError as error:
            # optax.chain, MultiSteps and the like take any keyword and hand all of them to what
            # they are made of. There optax.contrib.sam takes grad_fn alone, and line searches all
            # but grad_fn (optax 0.2.8), which no signature outside of them tells.
            if "unexpected keyword argument" not in str(error).lower():
                raise
            taken = {name: x for name, x in extra_args.items() if f"'{name}'" not in str(error)}
            if len(taken) == len(extra_args):
                raise
            return update(updates, state, params, **taken)

    return optax.GradientTransformationExtraArgs(tx.init, update)
