"""Arguments that make no sense: the message names them, what was expected, and what came."""

import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import functrain as ft

STATE = {"w": jnp.ones(2)}


def saver() -> ft.Checkpointer:
    return ft.Checkpointer("run")


CASES: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "monitor": (lambda: ft.Checkpointer("run", monitor=3), TypeError, "monitor: .*got int"),  # type: ignore[arg-type]
    "null": (lambda: ft.Checkpointer("a\0b"), ValueError, "directory: .*null character"),
    "values": (
        lambda: saver().save(STATE, 1, values={"a": "x"}),
        ValueError,
        "string to float: 'x'",
    ),  # type: ignore[dict-item]
    "step": (lambda: saver().save(STATE, -1), TypeError, "position: .*got -1"),
    "a step in an array": (
        lambda: saver().save(STATE, jnp.int32(3)),  # type: ignore[arg-type]
        TypeError,
        r"position: .*got int32\[\]\. For an array, pass int\(state\.step\)",
    ),
    "a traced state": (
        lambda: jax.jit(lambda state: ft.save("s", state))(STATE),
        TypeError,
        r"w: .*got float32\[2\].*outside of jit",
    ),
    "restore": (lambda: saver().restore(STATE, "3"), ValueError, "step: .*got '3'"),  # type: ignore[arg-type]
    "rollback": (lambda: saver().rollback(-1), ValueError, "step: .*got -1"),
    "source": (lambda: ft.warm_start(STATE, None), TypeError, "source: expected a path.*None"),  # type: ignore[arg-type]
    "take": (lambda: ft.warm_start(STATE, "s", take=3), TypeError, "take: .*patterns?.*got 3"),  # type: ignore[arg-type]
    "a run below a file": (lambda: ft.Checkpointer("file/x").save(STATE, 1), OSError, "file/x"),
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
