"""Passing each optax update the keyword arguments that it takes."""

from typing import Any

import optax

from functrain.common._arguments import parameters
from functrain.common._types import PyTree


def with_any_extra_args(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Returns the transformation with an `update` that ignores the keywords it does not know.

    `optax.with_extra_args_support` drops all keywords of transformations of another class than
    `GradientTransformationExtraArgs`, such as `optax.MultiSteps`.
    """

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: Any
    ) -> tuple[PyTree, PyTree]:
        arguments = parameters(tx.update)
        # A jitted update refuses functions before it looks at their names.
        if not any(x.kind is x.VAR_KEYWORD for x in arguments.values()):
            extra_args = {name: x for name, x in extra_args.items() if name in arguments}
        try:
            updated: tuple[PyTree, PyTree] = tx.update(updates, state, params, **extra_args)
            return updated
        except TypeError as error:
            # optax.chain, MultiSteps and similar wrappers take any keyword and pass all of them to
            # the transformations inside. Of those, optax.contrib.sam takes only grad_fn, and line
            # searches take everything except grad_fn (optax 0.2.8). The signature of the wrapper
            # does not show that, so the name of the refused keyword is read from the error.
            message = str(error)
            is_refusal = "unexpected keyword argument" in message.lower()
            refused = [name for name in extra_args if is_refusal and f"'{name}'" in message]
            if not refused:
                raise
        accepted = {name: value for name, value in extra_args.items() if name not in refused}
        return update(updates, state, params, **accepted)

    return optax.GradientTransformationExtraArgs(tx.init, update)
