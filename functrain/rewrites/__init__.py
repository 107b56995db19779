"""Operations that XLA compiles badly on CPU, rewritten before they are compiled.

One rewrite a file. To add one: write the file, list it in `_optimize.REWRITES`, test it.
"""

from functrain.rewrites._explain import Explanation, explain
from functrain.rewrites._optimize import Mode, mode, optimize

__all__ = ["Explanation", "Mode", "explain", "mode", "optimize"]
