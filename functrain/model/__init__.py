"""A model as a pair of pure functions, and flax modules as such."""

from functrain.model._linen import from_linen as from_linen
from functrain.model._model import Model as Model
from functrain.model._model import ModelOutput as ModelOutput
from functrain.model._nnx import from_nnx as from_nnx

__all__ = ["Model", "ModelOutput", "from_linen", "from_nnx"]
