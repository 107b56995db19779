"""Saving a state and loading it back, bit for bit."""

from functrain.checkpoint._io import load as load
from functrain.checkpoint._io import save as save

__all__ = ["load", "save"]
