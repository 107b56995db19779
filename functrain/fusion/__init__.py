"""Many steps in one program."""

from functrain.fusion._fuse import Fused as Fused
from functrain.fusion._fuse import fuse as fuse

__all__ = ["Fused", "fuse"]
