"""Models as pairs of pure functions.

Files:
  _model: Model, init and apply
  _linen: a linen module as one
  _nnx: an nnx module as one
  _switches: how flax modules are told that they train
"""

from functrain.model._linen import from_linen as from_linen
from functrain.model._model import Model as Model
from functrain.model._model import ModelOutput as ModelOutput
from functrain.model._nnx import from_nnx as from_nnx
