"""Transformations of optax's kind, and what they remember, in words that steps understand.

Files:
  _guards: updates that are not finite are skipped; losses scaled for float16
  _ema: an average of the params
  _groups: another transformation for other params
  _extra_args: which keywords an update is given
  _logs: what a transformation says of itself

Examples:
  >>> import functrain as ft, optax
  >>> tx = ft.tx.skip_non_finite(optax.chain(ft.tx.log_norm("grad_norm"), optax.adam(1e-3)))
"""

from functrain.tx._ema import ema as ema
from functrain.tx._ema import ema_params as ema_params
from functrain.tx._groups import param_groups as param_groups
from functrain.tx._guards import loss_scale as loss_scale
from functrain.tx._guards import skip_non_finite as skip_non_finite
from functrain.tx._logs import log_norm as log_norm
from functrain.tx._logs import logged as logged

__all__ = [
    "ema",
    "ema_params",
    "log_norm",
    "logged",
    "loss_scale",
    "param_groups",
    "skip_non_finite",
]
