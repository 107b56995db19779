"""Arguments that make no sense: the message names them, what was expected, and what came."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import functrain as ft

STATE = {"w": jnp.ones(2)}
X = jnp.ones((1, 2))


def saver() -> ft.Checkpointer:
    return ft.Checkpointer("run")


def fit(hook: Any) -> None:
    data = ft.ArrayLoader(np.ones(4, np.float32), 2)
    ft.fit(0.0, lambda s, b: (s + b.sum(), {"loss": s}), data, hooks=[hook], verbose=0)


CASES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "monitor": (lambda: ft.Checkpointer("run", monitor=3), TypeError, "monitor: .*got int"),  # type: ignore[arg-type]
    "budget": (lambda: ft.Checkpointer("run", budget="10%"), ValueError, "budget: .*got '10%'"),  # type: ignore[arg-type]
    "budget of True": (lambda: ft.Checkpointer("run", budget=True), ValueError, "budget: "),
    "null": (lambda: ft.Checkpointer("a\0b"), ValueError, "directory: .*null character"),
    "values": (lambda: saver().save(STATE, 1, values={"a": "x"}), TypeError, "values: .*'x'"),  # type: ignore[dict-item]
    "no value": (lambda: saver().save(STATE, 1, values={"a": None}), TypeError, "values: .*None"),  # type: ignore[dict-item]
    "a list of values": (lambda: saver().save(STATE, 1, values=[1]), TypeError, "values: .*list"),  # type: ignore[arg-type]
    "documents": (lambda: saver().save(STATE, 1, documents=3), TypeError, "documents: .*got int"),  # type: ignore[arg-type]
    "step": (lambda: saver().save(STATE, -1), TypeError, "position: .*at least 0, got -1"),
    "a step in an array": (
        lambda: saver().save(STATE, jnp.int32(3)),  # type: ignore[arg-type]
        TypeError,
        r"position: .*got int32\[\]\. Of an array: int\(state\.step\)",
    ),
    "a traced state": (
        lambda: jax.jit(lambda state: ft.save("s", state))(STATE),
        TypeError,
        r"w: .*got float32\[2\] without a value.*outside of jit",
    ),
    "the shapes of a state": (
        lambda: saver().save(jax.eval_shape(lambda: STATE), 1),
        TypeError,
        r"w: .*got float32\[2\] without a value",
    ),
    "restore": (lambda: saver().restore(STATE, "3"), ValueError, "step: .*got '3'"),  # type: ignore[arg-type]
    "verify": (lambda: saver().verify(1.5), ValueError, r"step: .*got 1\.5"),  # type: ignore[arg-type]
    "rollback": (lambda: saver().rollback(-1), ValueError, "step: .*got -1"),
    "source": (lambda: ft.warm_start(STATE, None), TypeError, "source: expected a path.*None"),  # type: ignore[arg-type]
    "take": (lambda: ft.warm_start(STATE, "s", take=3), TypeError, "take: .*patterns?.*got int"),  # type: ignore[arg-type]
    "rename": (lambda: ft.warm_start(STATE, "s", rename={}), TypeError, "rename: .*function"),  # type: ignore[arg-type]
    "cast": (lambda: ft.warm_start(STATE, "s", cast="bf16"), ValueError, "cast: .*'bf16'"),  # type: ignore[arg-type]
    "save below a file": (lambda: ft.save("file/x", STATE), OSError, "got a file at .*file"),
    "a run below a file": (lambda: ft.Checkpointer("file/x").save(STATE, 1), OSError, "got a file"),
    "events below a file": (lambda: fit(ft.hooks.TensorBoard("file/x")), OSError, "got a file at"),
    "a trace below a file": (lambda: fit(ft.hooks.Profile("file/x")), OSError, "got a file at"),
    "params below a file": (
        lambda: ft.export.params("file/p.safetensors", STATE),
        OSError,
        "got a file",
    ),
    "a log of None": (lambda: ft.hooks.CSVLogger(None), TypeError, "path: expected a path.*None"),  # type: ignore[arg-type]
    "append": (lambda: ft.hooks.CSVLogger("x", append=1), ValueError, "append: .*got 1"),  # type: ignore[arg-type]
    "a loss of 3": (lambda: ft.hooks.TerminateOnNaN(monitor=3), TypeError, "monitor: .*got int"),  # type: ignore[arg-type]
    "exits": (lambda: ft.hooks.Watchdog(3, exits=2), ValueError, "exits: .*got 2"),  # type: ignore[arg-type]
    "another order": (
        lambda: ft.export.predict("m", lambda p, x: x, STATE, X),  # type: ignore[arg-type]
        TypeError,
        r"state: .*The order is export\.predict\(path, state, step, inputs\)",
    ),
    "inputs": (
        lambda: ft.export.predict("m", STATE, lambda s, x: (s, x), {"x": "text"}),
        TypeError,
        "inputs: x: .*got 'text'",
    ),
    "platforms": (
        lambda: ft.export.predict("m", STATE, lambda s, x: (s, x), X, platforms=3),  # type: ignore[arg-type]
        TypeError,
        "platforms: .*got int",
    ),
    "address": (
        lambda: ft.distributed.initialize(8080, 2, 0),  # type: ignore[arg-type]
        TypeError,
        "coordinator_address: .*got int",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_makes_no_sense_is_refused_by_its_name(
    name: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pathlib.Path("file").write_text("")
    act, error, message = CASES[name]
    with pytest.raises(error, match=message):
        act()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
