"""Keras models in, Keras models out: the bridge between Keras on JAX and functrain.

Importing it before Keras sets `KERAS_BACKEND=jax` where the variable is unset.
"""

from bridge._backend import require_jax

require_jax()  # before anything imports keras: it picks its backend then, once

import functrain  # noqa: E402
from bridge._version import __version__, require_same  # noqa: E402

require_same(functrain)  # before a stale functrain can fail on a name it does not have

from bridge.model import from_flax, from_keras, to_linen  # noqa: E402
from bridge.model._scope import no_side_effects  # noqa: E402
from bridge.optim import OptaxOptimizer, constraints, loss, metric, optimizer, schedule  # noqa: E402
from bridge.state import (  # noqa: E402
    KerasState,
    create_state,
    from_distribution,
    keras_state,
    to_distribution,
    to_keras,
    warm_start,
)
from bridge.train import evaluate, fit, predict, test_step, train_step  # noqa: E402
from functrain.internal import add_guard  # noqa: E402

add_guard(no_side_effects)

del add_guard, functrain, no_side_effects, require_jax, require_same

__all__ = [
    "KerasState",
    "OptaxOptimizer",
    "__version__",
    "constraints",
    "create_state",
    "evaluate",
    "fit",
    "from_distribution",
    "from_flax",
    "from_keras",
    "keras_state",
    "loss",
    "metric",
    "optimizer",
    "predict",
    "schedule",
    "test_step",
    "to_distribution",
    "to_keras",
    "to_linen",
    "train_step",
    "warm_start",
]
