"""Identities hold between compilations, too: here nothing compiled before is used."""

import pytest


@pytest.fixture(autouse=True)
def every_program_is_compiled(compiled_anew: None) -> None:
    """For each test."""
