"""The table of summary, cell by cell."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from functrain import TrainState
from functrain.step._summary import summary

PARAMS = {
    "dense": {"kernel": jnp.ones((64, 8)), "bias": jnp.zeros(8)},
    "scale": jnp.ones((), jnp.bfloat16),
}


def create(model_state=()):
    return TrainState.create(
        params=PARAMS,
        model_state=model_state,
        tx=optax.sgd(0.1, momentum=0.9),
        rng=jax.random.key(0),
    )


def rows(text):
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return {row[0].strip(): tuple(cell.strip() for cell in row[1:]) for row in cells}


def test_every_leaf_of_params_has_a_row():
    table = rows(summary(create()))
    assert table["params"] == ("dtype", "shape", "count", "bytes")
    assert table["dense/kernel"] == ("float32", "[64, 8]", "512", "2.0 KiB")
    assert table["dense/bias"] == ("float32", "[8]", "8", "32 B")
    assert table["scale"] == ("bfloat16", "[]", "1", "2 B")
    assert len(table) == 8


def test_totals_are_those_of_the_parts_and_of_the_whole():
    table = rows(summary(create(model_state={"mean": jnp.zeros(3)})))
    assert table["all of params"][2:] == ("521", "2.0 KiB")
    assert table["all of model_state"][2:] == ("3", "12 B")
    assert table["all of opt_state"][2:] == ("521", "2.0 KiB")
    # step: 4 B, rng: one key of 8 B
    assert table["whole state"][2:] == ("1,047", "4.1 KiB")


def test_an_abstract_state_has_the_same_table():
    assert summary(jax.eval_shape(create)) == summary(create())


def test_any_other_pytree_lists_all_its_leaves():
    table = rows(summary({"a": [jnp.ones(2), np.float64(1)], "key": jax.random.key(0), "n": 3}))
    assert table["a/0"] == ("float32", "[2]", "2", "8 B")
    assert table["a/1"] == ("float64", "[]", "1", "8 B")
    assert table["key"] == ("key<fry>", "[]", "1", "8 B")
    assert table["n"] == ("int", "-", "0", "0 B")
    assert table["all"] == ("", "", "4", "24 B")


@pytest.mark.parametrize("state", [(), None, {}])
def test_a_tree_without_leaves_has_a_total_of_nothing(state):
    assert rows(summary(state))["all"] == ("", "", "0", "0 B")


def test_long_paths_are_not_cut_whatever_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    path = "/".join(["a_rather_long_name[bold]:smile:"] * 20)
    assert path in rows(summary({path: jnp.ones(1)}))


def test_the_text_is_plain_ascii_in_lines_of_one_width(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = summary(create())
    assert text.isascii()
    assert all(line.isprintable() for line in text.splitlines())
    assert len({len(line) for line in text.splitlines()}) == 1


@pytest.mark.parametrize(
    ("count", "text"),
    [(1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**19, "1.5 MiB"), (2**52, "4096.0 TiB")],
)
def test_bytes_are_for_people(count, text):
    assert rows(summary({"x": jax.ShapeDtypeStruct((count,), jnp.int8)}))["x"][3] == text
