"""Files for programs that know nothing of functrain.

Files:
  _params: arrays, for whatever reads safetensors
  _predict: a model that predicts, for whatever has jax
  _whole: files that appear under their name when they are whole

Examples:
  >>> import functrain as ft, jax.numpy as jnp, tempfile
  >>> with tempfile.TemporaryDirectory() as folder:
  ...     ft.export.params(f"{folder}/params.safetensors", {"kernel": jnp.ones((3, 2))})
"""

from functrain.export._params import params as params
from functrain.export._predict import predict as predict

__all__ = ["params", "predict"]
