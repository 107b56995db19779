"""Identities hold between compilations, too: here nothing compiled before is used."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(autouse=True)
def compiled_anew(monkeypatch: pytest.MonkeyPatch):
    """Every process compiles its programs itself."""
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "0")
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
