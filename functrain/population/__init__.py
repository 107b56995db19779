"""A population: many models of one kind, trained by one program.

Files:
  _state: the stacked states, and how they come to be and come apart
  _hyperparameters: learning rates and the like, one a member
  _over_members: a function of one member as one of all; the stopped stay as they are
  _loader: batches of which each member has its own
  _step: the step over all members
  _predict: what they predict together
  _select: the best member; copies of the best in place of the worst
  _early_stopping: stopping each member when it no longer gets better
  _autotune: at once, one after another, or in blocks: measured
"""

from functrain.population._autotune import BlockTuning as BlockTuning
from functrain.population._autotune import autotune as autotune
from functrain.population._early_stopping import EarlyStopping as EarlyStopping
from functrain.population._hyperparameters import hyperparameters as hyperparameters
from functrain.population._hyperparameters import with_hyperparameters as with_hyperparameters
from functrain.population._loader import Loader as Loader
from functrain.population._predict import predict_step as predict_step
from functrain.population._select import resample as resample
from functrain.population._select import select as select
from functrain.population._state import PopulationState as PopulationState
from functrain.population._state import create as create
from functrain.population._state import stack as stack
from functrain.population._step import step as step

__all__ = [
    "BlockTuning",
    "EarlyStopping",
    "Loader",
    "PopulationState",
    "autotune",
    "create",
    "hyperparameters",
    "predict_step",
    "resample",
    "select",
    "stack",
    "step",
    "with_hyperparameters",
]
