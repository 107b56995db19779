import sys

import jax
import numpy as np

import functrain as ft
from tests import fork_server

from ..conftest import compilation_cache

PROGRAM = """
import sys, functrain as ft, jax, jax.numpy as jnp
ft.enable_compilation_cache(sys.argv[1])
hits = []
jax.monitoring.register_event_listener(
    lambda event, **_: hits.append(event) if event.endswith("cache_hits") else None
)
ft.fuse(lambda s, b: (s + jnp.sum(b), {}), 2)(jnp.zeros(()), jnp.ones((2, 3)))
print(len(hits))
"""


def test_a_second_process_takes_its_programs_from_the_cache(tmp_path) -> None:
    hits = [
        int(
            fork_server.run(
                [sys.executable, "-c", PROGRAM, tmp_path / "cache"],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for _ in range(2)
    ]
    assert hits[0] == 0
    assert hits[1] > 0


def test_programs_go_into_the_directory_that_was_named_last(tmp_path) -> None:
    with compilation_cache(tmp_path / "first"):
        for factor, name in enumerate(("first", "second")):
            ft.enable_compilation_cache(tmp_path / name)
            jax.jit(lambda x, factor=factor: x * (2 + factor))(np.ones(3))
            assert list((tmp_path / name).iterdir())


def test_a_directory_that_only_the_config_of_jax_names_is_opened(tmp_path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with compilation_cache(first):
        jax.jit(lambda x: x * 5)(np.ones(3))
        before = list(first.iterdir())
        # jax has opened the first directory, and does not close it here.
        jax.config.update("jax_compilation_cache_dir", str(second))
        ft.enable_compilation_cache(second)
        jax.jit(lambda x: x * 6)(np.ones(3))
        assert before
        assert list(first.iterdir()) == before
        assert list(second.iterdir())
