"""Populations: many models with the same structure, trained by one program.

Files:
  _state: the stacked states, and functions to create, stack and index them
  _shared: leaves that all members share, such as a frozen base
  _hyperparameters: hyperparameters with one value for each member, such as learning rates
  _over_members: maps a function of one member over all
  _stopped: keeps the leaves of members that are not active
  _blocks: takes the steps of a program with as many members as stay on the chip of a TPU
  _loader: a loader with different batches for each member
  _step: the step of a population
  _predict: predictions of all members, combined or each
  _select: selects the best member, or replaces the worst members by copies of the best
  _early_stopping: stops each member when its value no longer improves
"""

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
    "EarlyStopping",
    "Loader",
    "PopulationState",
    "create",
    "hyperparameters",
    "predict_step",
    "resample",
    "select",
    "stack",
    "step",
    "with_hyperparameters",
]
