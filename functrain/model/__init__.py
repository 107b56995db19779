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
