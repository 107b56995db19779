"""Files for programs without functrain.

Files:
  _params: arrays, for programs that read safetensors
  _orbax: checkpoints of Orbax
  _peft: adapters, for PEFT
  _predict: a model that predicts, for programs that have jax
  _atomic: files that get their name only when they are complete

Examples:
  >>> import functrain as ft, jax.numpy as jnp, tempfile
  >>> with tempfile.TemporaryDirectory() as folder:
  ...     ft.export.params(f"{folder}/params.safetensors", {"kernel": jnp.ones((3, 2))})
"""

from functrain.export._orbax import orbax as orbax
from functrain.export._params import params as params
from functrain.export._peft import peft as peft
from functrain.export._peft import peft_rules as peft_rules
from functrain.export._predict import predict as predict

__all__ = ["orbax", "params", "peft", "peft_rules", "predict"]
