"""Models as pairs of pure functions.

Files:
  _model: Model, the pair of init and apply, and what apply returns
  _linen: models from linen modules
  _nnx: models from nnx modules
  _equinox: models from Equinox modules
  _freeze: models with frozen params
  _lora: frozen models with trained matrices of low rank
  _adapters: matrices with adapters, and products with them
  _cast: mixed precision
  _remat: less memory in exchange for more computation
  _split: trees in two parts, such as params that are trained and frozen; float8 scales
  _call: the arguments that modules are called with
"""

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
