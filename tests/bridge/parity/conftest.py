"""Keras's fit and ours are compared as both are compiled, each for itself."""

import pytest


@pytest.fixture(autouse=True)
def every_program_is_compiled(compiled_anew: None) -> None:
    """For each test."""
