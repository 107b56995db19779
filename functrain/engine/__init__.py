"""Many steps in one program."""

from functrain.engine._autotune import autotune as autotune
from functrain.engine._cache import enable_compilation_cache as enable_compilation_cache
from functrain.engine._fuse import Fused as Fused
from functrain.engine._fuse import fuse as fuse
from functrain.engine._position import Position as Position
from functrain.engine._trigger import Trigger as Trigger
from functrain.engine._trigger import at as at
from functrain.engine._trigger import every as every

__all__ = [
    "Fused",
    "Position",
    "Trigger",
    "at",
    "autotune",
    "enable_compilation_cache",
    "every",
    "fuse",
]
