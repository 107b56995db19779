"""functrain: functional training in JAX.

A state is a pytree, a step is a pure function, and a program takes many steps at once.
"""

from functrain import distributed as distributed
from functrain import events as events
from functrain import export as export
from functrain import hooks as hooks
from functrain import inspect as inspect
from functrain import metrics as metrics
from functrain import population as population
from functrain import rewrites as rewrites
from functrain import sharding as sharding
from functrain import tx as tx
from functrain._version import __version__ as __version__
from functrain.checkpoint import CheckpointCorruptError as CheckpointCorruptError
from functrain.checkpoint import Checkpointer as Checkpointer
from functrain.checkpoint import CheckpointMismatchError as CheckpointMismatchError
from functrain.checkpoint import WarmStart as WarmStart
from functrain.checkpoint import load as load
from functrain.checkpoint import save as save
from functrain.checkpoint import warm_start as warm_start
from functrain.checkpoint import watch_checkpoints as watch_checkpoints
from functrain.common._types import Step as Step
from functrain.data import ArrayLoader as ArrayLoader
from functrain.data import NoData as NoData
from functrain.engine import Fused as Fused
from functrain.engine import Position as Position
from functrain.engine import at as at
from functrain.engine import enable_compilation_cache as enable_compilation_cache
from functrain.engine import every as every
from functrain.engine import fuse as fuse
from functrain.loop import Run as Run
from functrain.loop import evaluate as evaluate
from functrain.loop import predict as predict
from functrain.loop import run as run
from functrain.model import Model as Model
from functrain.model import ModelOutput as ModelOutput
from functrain.model import cast as cast
from functrain.model import freeze as freeze
from functrain.model import from_equinox as from_equinox
from functrain.model import from_linen as from_linen
from functrain.model import from_nnx as from_nnx
from functrain.model import lora as lora
from functrain.model import merge_frozen as merge_frozen
from functrain.model import remat as remat
from functrain.step import Aux as Aux
from functrain.step import LossFn as LossFn
from functrain.step import MeteredStep as MeteredStep
from functrain.step import TrainState as TrainState
from functrain.step import eval_step as eval_step
from functrain.step import micro_batches as micro_batches
from functrain.step import predict_step as predict_step
from functrain.step import step_key as step_key
from functrain.step import supervised as supervised
from functrain.step import train_step as train_step
from functrain.step import update as update
from functrain.targets import Target as Target
from functrain.targets import target as target
from functrain.trainer import FitResult as FitResult
from functrain.trainer import History as History
from functrain.trainer import fit as fit

__all__ = [
    "ArrayLoader",
    "Aux",
    "CheckpointCorruptError",
    "CheckpointMismatchError",
    "Checkpointer",
    "FitResult",
    "Fused",
    "History",
    "LossFn",
    "MeteredStep",
    "Model",
    "ModelOutput",
    "NoData",
    "Position",
    "Run",
    "Step",
    "Target",
    "TrainState",
    "WarmStart",
    "__version__",
    "at",
    "cast",
    "distributed",
    "enable_compilation_cache",
    "eval_step",
    "evaluate",
    "events",
    "every",
    "export",
    "fit",
    "freeze",
    "from_equinox",
    "from_linen",
    "from_nnx",
    "fuse",
    "hooks",
    "inspect",
    "load",
    "lora",
    "merge_frozen",
    "metrics",
    "micro_batches",
    "population",
    "predict",
    "predict_step",
    "remat",
    "rewrites",
    "run",
    "save",
    "sharding",
    "step_key",
    "supervised",
    "target",
    "train_step",
    "tx",
    "update",
    "warm_start",
    "watch_checkpoints",
]
