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
from functrain.checkpoint._checkpoint import load as load
from functrain.checkpoint._checkpoint import save as save
from functrain.checkpoint._checkpointer import Checkpointer as Checkpointer
from functrain.checkpoint._errors import CheckpointCorruptError as CheckpointCorruptError
from functrain.checkpoint._errors import CheckpointMismatchError as CheckpointMismatchError
from functrain.checkpoint._rename import Rename as Rename
from functrain.checkpoint._warm_start import WarmStart as WarmStart
from functrain.checkpoint._warm_start import warm_start as warm_start
from functrain.checkpoint._watch import watch_checkpoints as watch_checkpoints
from functrain.common._types import Step as Step
from functrain.data._batches import NoData as NoData
from functrain.data._loader import ArrayLoader as ArrayLoader
from functrain.engine._cache import enable_compilation_cache as enable_compilation_cache
from functrain.engine._fuse import Fused as Fused
from functrain.engine._fuse import fuse as fuse
from functrain.engine._position import Position as Position
from functrain.engine._trigger import at as at
from functrain.engine._trigger import every as every
from functrain.loop._passes import evaluate as evaluate
from functrain.loop._passes import predict as predict
from functrain.loop._run import Run as Run
from functrain.loop._run import run as run
from functrain.model._cast import cast as cast
from functrain.model._equinox import from_equinox as from_equinox
from functrain.model._freeze import freeze as freeze
from functrain.model._freeze import merge_frozen as merge_frozen
from functrain.model._linen import from_linen as from_linen
from functrain.model._lora import lora as lora
from functrain.model._model import Model as Model
from functrain.model._model import ModelOutput as ModelOutput
from functrain.model._nnx import from_nnx as from_nnx
from functrain.model._remat import remat as remat
from functrain.step._eval import eval_step as eval_step
from functrain.step._eval import predict_step as predict_step
from functrain.step._loss import Aux as Aux
from functrain.step._loss import LossFn as LossFn
from functrain.step._metered import MeteredStep as MeteredStep
from functrain.step._micro_batches import micro_batches as micro_batches
from functrain.step._state import TrainState as TrainState
from functrain.step._state import step_key as step_key
from functrain.step._supervised import supervised as supervised
from functrain.step._train import train_step as train_step
from functrain.step._update import update as update
from functrain.targets import Target as Target
from functrain.targets import target as target
from functrain.trainer._fit import FitResult as FitResult
from functrain.trainer._fit import fit as fit
from functrain.trainer._history import History as History

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
    "Rename",
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
