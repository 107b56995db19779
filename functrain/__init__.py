"""functrain: functional training in JAX.

A state is a pytree, a step is a pure function, and a program takes many steps at once.
"""

from functrain import distributed as distributed
from functrain import hooks as hooks
from functrain import inspect as inspect
from functrain import metrics as metrics
from functrain import population as population
from functrain import rewrites as rewrites
from functrain import sharding as sharding
from functrain._version import __version__ as __version__
from functrain.checkpoint import CheckpointCorruptError as CheckpointCorruptError
from functrain.checkpoint import Checkpointer as Checkpointer
from functrain.checkpoint import CheckpointMismatchError as CheckpointMismatchError
from functrain.checkpoint import WarmStart as WarmStart
from functrain.checkpoint import load as load
from functrain.checkpoint import save as save
from functrain.checkpoint import warm_start as warm_start
from functrain.common._compile import MiscompilationWarning as MiscompilationWarning
from functrain.common._types import Step as Step
from functrain.data import ArrayLoader as ArrayLoader
from functrain.engine import Fused as Fused
from functrain.engine import Position as Position
from functrain.engine import Trigger as Trigger
from functrain.engine import at as at
from functrain.engine import enable_compilation_cache as enable_compilation_cache
from functrain.engine import every as every
from functrain.engine import fuse as fuse
from functrain.export import export_params as export_params
from functrain.export import export_predict as export_predict
from functrain.inspect import Doctor as Doctor
from functrain.inspect import autotune as autotune
from functrain.inspect import doctor as doctor
from functrain.inspect import explain_nan as explain_nan
from functrain.inspect import memory as memory
from functrain.inspect import summary as summary
from functrain.loop import ChunkEnd as ChunkEnd
from functrain.loop import EpochEnd as EpochEnd
from functrain.loop import Event as Event
from functrain.loop import LogsReady as LogsReady
from functrain.loop import Run as Run
from functrain.loop import RunEnd as RunEnd
from functrain.loop import evaluate as evaluate
from functrain.loop import predict as predict
from functrain.loop import run as run
from functrain.metrics._metric import Metered as Metered
from functrain.metrics._metric import Metric as Metric
from functrain.model import Model as Model
from functrain.model import ModelOutput as ModelOutput
from functrain.model import cast as cast
from functrain.model import freeze as freeze
from functrain.model import from_linen as from_linen
from functrain.model import from_nnx as from_nnx
from functrain.model import remat as remat
from functrain.model import unfreeze as unfreeze
from functrain.step import Aux as Aux
from functrain.step import LossFn as LossFn
from functrain.step import MeteredStep as MeteredStep
from functrain.step import TrainState as TrainState
from functrain.step import eval_step as eval_step
from functrain.step import micro_batches as micro_batches
from functrain.step import predict_step as predict_step
from functrain.step import supervised as supervised
from functrain.step import train_step as train_step
from functrain.step import update as update
from functrain.trainer import FitResult as FitResult
from functrain.trainer import History as History
from functrain.trainer import fit as fit
from functrain.tx import ema_params as ema_params
from functrain.tx import groups as groups
from functrain.tx import log_norm as log_norm
from functrain.tx import logged as logged
from functrain.tx import loss_scale as loss_scale
from functrain.tx import params_ema as params_ema
from functrain.tx import skip_non_finite as skip_non_finite
from functrain.tx import with_ema as with_ema

__all__ = [
    "ArrayLoader",
    "Aux",
    "CheckpointCorruptError",
    "CheckpointMismatchError",
    "Checkpointer",
    "ChunkEnd",
    "Doctor",
    "EpochEnd",
    "Event",
    "FitResult",
    "Fused",
    "History",
    "LogsReady",
    "LossFn",
    "Metered",
    "MeteredStep",
    "Metric",
    "MiscompilationWarning",
    "Model",
    "ModelOutput",
    "Position",
    "Run",
    "RunEnd",
    "Step",
    "TrainState",
    "Trigger",
    "WarmStart",
    "__version__",
    "at",
    "autotune",
    "cast",
    "distributed",
    "doctor",
    "ema_params",
    "enable_compilation_cache",
    "eval_step",
    "evaluate",
    "every",
    "explain_nan",
    "export_params",
    "export_predict",
    "fit",
    "freeze",
    "from_linen",
    "from_nnx",
    "fuse",
    "groups",
    "hooks",
    "inspect",
    "load",
    "log_norm",
    "logged",
    "loss_scale",
    "memory",
    "metrics",
    "micro_batches",
    "params_ema",
    "population",
    "predict",
    "predict_step",
    "remat",
    "rewrites",
    "run",
    "save",
    "sharding",
    "skip_non_finite",
    "summary",
    "supervised",
    "train_step",
    "unfreeze",
    "update",
    "warm_start",
    "with_ema",
]
