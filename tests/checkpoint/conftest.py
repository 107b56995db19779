"""Orbax that fails or is interrupted leaves things behind, which Python complains of later."""

import gc

import pytest


@pytest.fixture(scope="module")
def complaints_come_here():
    """What Orbax left is collected before tests begin that allow no complaints."""
    yield
    gc.collect()
