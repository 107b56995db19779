"""A loader's worker is a child of the process that writes, and no writer."""

import os
import pathlib
import warnings

import numpy as np
import pytest

import functrain as ft


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_worker_that_lives_on_does_not_keep_others_from_writing(tmp_path: pathlib.Path) -> None:
    state = {"w": np.ones(2)}
    first = ft.Checkpointer(tmp_path)
    first.save(state, 1)
    waits, says = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the child only waits
        child = os.fork()
    if not child:
        os.close(says)
        os.read(waits, 1)
        os._exit(0)
    try:
        first.close()
        with ft.Checkpointer(tmp_path) as second:
            second.save(state, 2)
        assert second.steps() == [1, 2]
    finally:
        os.close(says)
        os.waitpid(child, 0)
