"""The bridge between Keras on JAX and functrain: Keras models in, Keras models out.

Import it before Keras: it then sets `KERAS_BACKEND=jax` if the variable is unset.
"""

from bridge._backend import require_jax

# Keras chooses its backend once, when it is first imported, and the imports below import it.
require_jax()

from bridge.model._from_flax import FlaxLayer as FlaxLayer
from bridge.model._from_flax import from_flax as from_flax
from bridge.model._from_keras import from_keras as from_keras
from bridge.model._from_keras import to_linen as to_linen
from bridge.model._scope import no_side_effects
from bridge.optim._constraints import constraints as constraints
from bridge.optim._losses import loss as loss
from bridge.optim._metrics import metric as metric
from bridge.optim._optax_optimizer import OptaxOptimizer as OptaxOptimizer
from bridge.optim._optimizers import optimizer as optimizer
from bridge.optim._schedules import schedule as schedule
from bridge.state._distribution import Placement as Placement
from bridge.state._distribution import from_distribution as from_distribution
from bridge.state._distribution import to_distribution as to_distribution
from bridge.state._keras_state import KerasState as KerasState
from bridge.state._keras_state import keras_state as keras_state
from bridge.state._train_state import create_state as create_state
from bridge.state._train_state import to_keras as to_keras
from bridge.state._warm_start import warm_start as warm_start
from bridge.train._fit import evaluate as evaluate
from bridge.train._fit import fit as fit
from bridge.train._fit import predict as predict
from bridge.train._reports import cost as cost
from bridge.train._reports import largest_batch as largest_batch
from bridge.train._reports import memory as memory
from bridge.train._steps import test_step as test_step
from bridge.train._steps import train_step as train_step
from functrain import __version__ as __version__
from functrain.internal import add_guard

# Every step is traced under this guard. A step of pure JAX does not notice it.
add_guard(no_side_effects)

del add_guard, no_side_effects, require_jax

__all__ = [
    "FlaxLayer",
    "KerasState",
    "OptaxOptimizer",
    "Placement",
    "__version__",
    "constraints",
    "cost",
    "create_state",
    "evaluate",
    "fit",
    "from_distribution",
    "from_flax",
    "from_keras",
    "keras_state",
    "largest_batch",
    "loss",
    "memory",
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
