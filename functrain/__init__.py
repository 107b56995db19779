"""functrain: functional training in JAX.

A state is a pytree, a step is a pure function, and a program takes many steps at once.
"""

from functrain import hooks as hooks
from functrain import rewrites as rewrites
from functrain._autotune import Tuning as Tuning
from functrain._autotune import TuningRow as TuningRow
from functrain._autotune import autotune as autotune
from functrain._cache import enable_compilation_cache as enable_compilation_cache
from functrain._evaluate import evaluate as evaluate
from functrain._evaluate import predict as predict
from functrain._fit import FitResult as FitResult
from functrain._fit import fit as fit
from functrain._flax import from_linen as from_linen
from functrain._flax import from_nnx as from_nnx
from functrain._history import History as History
from functrain._loss import Aux as Aux
from functrain._loss import LossFn as LossFn
from functrain._loss import Reduction as Reduction
from functrain._loss import supervised as supervised
from functrain._metrics import Metered as Metered
from functrain._metrics import Metric as Metric
from functrain._metrics import accuracy as accuracy
from functrain._metrics import binary_accuracy as binary_accuracy
from functrain._metrics import collection as collection
from functrain._metrics import mean as mean
from functrain._metrics import mean_absolute_error as mean_absolute_error
from functrain._metrics import mean_loss as mean_loss
from functrain._metrics import mean_squared_error as mean_squared_error
from functrain._metrics import top_k_accuracy as top_k_accuracy
from functrain._model import Model as Model
from functrain._model import ModelOutput as ModelOutput
from functrain._run import ChunkEnd as ChunkEnd
from functrain._run import EpochEnd as EpochEnd
from functrain._run import Event as Event
from functrain._run import RunEnd as RunEnd
from functrain._run import run as run
from functrain._state import TrainState as TrainState
from functrain._step import MeteredStep as MeteredStep
from functrain._step import eval_step as eval_step
from functrain._step import predict_step as predict_step
from functrain._step import train_step as train_step
from functrain._step import update as update
from functrain._summary import summary as summary
from functrain._trigger import Trigger as Trigger
from functrain._trigger import at as at
from functrain._trigger import every as every
from functrain._types import Logs as Logs
from functrain._types import PyTree as PyTree
from functrain._types import Step as Step
from functrain._version import __version__ as __version__
from functrain.checkpoint import load as load
from functrain.checkpoint import save as save
from functrain.data import ArrayLoader as ArrayLoader
from functrain.fusion import Fused as Fused
from functrain.fusion import fuse as fuse

__all__ = [
    "ArrayLoader",
    "Aux",
    "ChunkEnd",
    "EpochEnd",
    "Event",
    "FitResult",
    "Fused",
    "History",
    "Logs",
    "LossFn",
    "Metered",
    "MeteredStep",
    "Metric",
    "Model",
    "ModelOutput",
    "PyTree",
    "Reduction",
    "RunEnd",
    "Step",
    "TrainState",
    "Trigger",
    "Tuning",
    "TuningRow",
    "__version__",
    "accuracy",
    "at",
    "autotune",
    "binary_accuracy",
    "collection",
    "enable_compilation_cache",
    "eval_step",
    "evaluate",
    "every",
    "fit",
    "from_linen",
    "from_nnx",
    "fuse",
    "hooks",
    "load",
    "mean",
    "mean_absolute_error",
    "mean_loss",
    "mean_squared_error",
    "predict",
    "predict_step",
    "rewrites",
    "run",
    "save",
    "summary",
    "supervised",
    "top_k_accuracy",
    "train_step",
    "update",
]
