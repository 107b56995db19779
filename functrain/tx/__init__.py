"""Optax transformations whose state and logs the steps of functrain understand.

Files:
  _guards: skipping updates that are not finite or spikes, and loss scaling for float16
  _ema: an exponential moving average of the params
  _groups: different transformations for different params
  _extra_args: passing each update the keywords that it takes
  _logs: scalars that a transformation logs

Examples:
  >>> import functrain as ft, optax
  >>> tx = ft.tx.skip_non_finite(optax.chain(ft.tx.log_norm("grad_norm"), optax.adam(1e-3)))
"""

from functrain.tx._ema import averaged as averaged
from functrain.tx._ema import ema as ema
from functrain.tx._ema import ema_params as ema_params
from functrain.tx._groups import param_groups as param_groups
from functrain.tx._guards import loss_scale as loss_scale
from functrain.tx._guards import skip_non_finite as skip_non_finite
from functrain.tx._guards import skip_spikes as skip_spikes
from functrain.tx._logs import log_norm as log_norm
from functrain.tx._logs import logged as logged

__all__ = [
    "averaged",
    "ema",
    "ema_params",
    "log_norm",
    "logged",
    "loss_scale",
    "param_groups",
    "skip_non_finite",
    "skip_spikes",
]
