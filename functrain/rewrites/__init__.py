"""Operations that XLA compiles badly, rewritten before they are compiled, for each platform.

One rewrite a file, or a few for one kind of operation. To add one: write it, list it in
`_optimize.REWRITES`, test it.
"""

from functrain.rewrites._optimize import Mode as Mode
from functrain.rewrites._optimize import optimize as optimize
from functrain.rewrites._optimize import resolve_mode as resolve_mode

__all__ = ["Mode", "optimize", "resolve_mode"]
