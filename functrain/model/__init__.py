"""Models as pairs of pure functions.

Files:
  _model: Model, init and apply
  _linen: a linen module as one
  _nnx: an nnx module as one
  _freeze: a part of it not trained
  _cast: mixed precision
  _remat: less memory, more work
  _switches: how flax modules are told that they train
"""

from functrain.model._cast import cast as cast
from functrain.model._freeze import freeze as freeze
from functrain.model._freeze import merge_frozen as merge_frozen
from functrain.model._linen import from_linen as from_linen
from functrain.model._model import Model as Model
from functrain.model._model import ModelOutput as ModelOutput
from functrain.model._nnx import from_nnx as from_nnx
from functrain.model._remat import remat as remat
