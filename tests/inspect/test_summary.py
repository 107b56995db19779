"""The table of summary, cell by cell."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import functrain as ft
from functrain import TrainState
from functrain.inspect._summary import summary

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
    assert table["params"] == ("array", "count", "bytes")
    assert table["dense/kernel"] == ("float32[64, 8]", "512", "2.0 KiB")
    assert table["dense/bias"] == ("float32[8]", "8", "32 B")
    assert table["scale"] == ("bfloat16[]", "1", "2 B")
    assert len(table) == 8


def test_totals_are_those_of_the_parts_and_of_the_whole():
    table = rows(summary(create(model_state={"mean": jnp.zeros(3)})))
    assert table["params (total)"][1:] == ("521", "2.0 KiB")
    assert table["model_state (total)"][1:] == ("3", "12 B")
    assert table["opt_state (total)"][1:] == ("521", "2.0 KiB")
    # step: 4 B, rng: one key of 8 B
    assert table["state (total)"][1:] == ("1,047", "4.1 KiB")


def test_an_abstract_state_has_the_same_table():
    assert summary(jax.eval_shape(create)) == summary(create())


def test_any_other_pytree_lists_all_its_leaves():
    table = rows(summary({"a": [jnp.ones(2), np.float64(1)], "key": jax.random.key(0), "n": 3}))
    assert table["a/0"] == ("float32[2]", "2", "8 B")
    assert table["a/1"] == ("float64[]", "1", "8 B")
    assert table["key"] == ("key<fry>[]", "1", "8 B")
    assert table["n"] == ("int", "0", "0 B")
    assert table["total"] == ("", "4", "24 B")


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


def flops(text):
    return int(text.splitlines()[-1].split()[-1].replace(",", ""))


@pytest.mark.parametrize("metrics", [None, {"mean": ft.metrics.mean_loss()}])
def test_the_operations_of_a_step_are_those_of_its_products(metrics):
    def loss_fn(params, model_state, batch, *, rng, training):
        return jnp.mean(batch @ params["w"]), ft.Aux(model_state)

    b, i, o = 64, 256, 512
    tx = optax.sgd(0.1)
    state = ft.TrainState.create(params={"w": jnp.ones((i, o))}, tx=tx)
    batch = jax.ShapeDtypeStruct((b, i), jnp.float32)
    step = ft.train_step(loss_fn, tx, metrics=metrics)
    text = summary(state, step=step, batch=batch)
    assert flops(text) == 2 * (2 * b * i * o)  # forward, and the gradient of w
    assert "products of matrices and convolutions: 2 in float32\n" in text
    with pytest.raises(ValueError, match="step and batch: expected both or neither"):
        summary(state, step=step)


def test_the_body_of_a_loop_counts_as_often_as_it_runs():
    def step(state, batch):
        def inner(x, _):
            return jnp.tanh(x) @ batch, None

        def outer(x, _):
            return jax.lax.scan(inner, x, None, length=5)[0], None

        return jax.lax.scan(outer, state, None, length=7, unroll=3)[0], {}

    shape = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    assert flops(summary(shape, step=step, batch=shape)) == 7 * 5 * 2 * 32**3
