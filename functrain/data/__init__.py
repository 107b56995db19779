"""Where batches come from."""

from functrain.data._loader import ArrayLoader as ArrayLoader

__all__ = ["ArrayLoader"]
