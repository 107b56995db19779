"""Files for programs that know nothing of functrain.

Files:
  _params: arrays, for whatever reads safetensors
  _predict: a model that predicts, for whatever has jax
  _whole: files that appear under their name when they are whole
"""

from functrain.export._params import params as params
from functrain.export._predict import predict as predict

__all__ = ["params", "predict"]
