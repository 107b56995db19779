"""Many steps in one program."""

from functrain.engine._fuse import Fused as Fused
from functrain.engine._fuse import fuse as fuse

__all__ = ["Fused", "fuse"]
