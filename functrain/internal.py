"""What functrain shares with `bridge`, and nobody else: it may change with any release.

The only door by which `bridge` takes what is not public; a test holds that.
"""

from functrain.common import _tree as tree
from functrain.common._checks import is_whole as is_whole
from functrain.common._types import PyTree as PyTree
from functrain.data._batch import unpack as unpack
from functrain.engine._feed import FuseArg as FuseArg
from functrain.engine._feed import filled as filled
from functrain.engine._feed import stacked as stacked
from functrain.engine._fuse import Fused as Fused
from functrain.engine._fuse import fuse as fuse
from functrain.engine._guards import add_guard as add_guard
from functrain.engine._interrupt import deferred_interrupt as deferred_interrupt
from functrain.engine._plan import auto_steps as auto_steps
from functrain.model._flax import SWITCHES as SWITCHES
from functrain.rewrites import Mode as Mode
from functrain.rewrites import mode as mode
from functrain.step._state import check_tx as check_tx

__all__ = [
    "SWITCHES",
    "FuseArg",
    "Fused",
    "Mode",
    "PyTree",
    "add_guard",
    "auto_steps",
    "check_tx",
    "deferred_interrupt",
    "filled",
    "fuse",
    "is_whole",
    "mode",
    "stacked",
    "tree",
    "unpack",
]
