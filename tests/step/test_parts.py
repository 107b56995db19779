"""Batches that are dicts, the labels and weights that metrics get, and what a loss may return."""

import chex
import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import functrain as ft

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3)).astype(np.float32)
Y = RNG.integers(0, 4, 40).astype(np.int32)
WEIGHT = (RNG.uniform(size=40) < 0.6).astype(np.float32)
MODEL = ft.from_linen(nn.Dense(4))
PARAMS, _ = MODEL.init(jax.random.key(0), X)
TX = optax.sgd(0.1)
CROSS_ENTROPY = optax.softmax_cross_entropy_with_integer_labels
KEYS = {"inputs": "image", "labels": "label", "sample_weight": "mask"}
PATHS = {"inputs": "image/pixels", "labels": "y", "sample_weight": "y/mask"}
FUNCTIONS = {
    "inputs": lambda b: b[0]["x"] / 1,
    "labels": lambda b: b[1],
    "sample_weight": lambda b: b[2],
}


def state():
    return ft.TrainState.create(params=PARAMS, tx=TX)


def logits64(x=X):
    kernel, bias = (np.asarray(PARAMS[name], np.float64) for name in ("kernel", "bias"))
    return x.astype(np.float64) @ kernel + bias


def losses64(x=X, y=Y):
    logits = logits64(x)
    return np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(y)), y]


HITS = (logits64().argmax(-1) == Y).astype(np.float64)


@pytest.mark.parametrize(
    ("parts", "data"),
    [
        (KEYS, {"id": np.arange(40), "image": X, "label": Y, "mask": WEIGHT}),
        (PATHS, {"image": {"pixels": X}, "y": Y, "y/mask": WEIGHT}),
        (FUNCTIONS, ({"x": X}, Y, WEIGHT)),
        ({}, (X, Y, WEIGHT)),
    ],
    ids=["keys", "paths", "functions", "a tuple"],
)
@pytest.mark.parametrize("size", [40, 7])
def test_parts_of_any_batch_train_and_are_measured(parts, data, size) -> None:
    loss_fn = ft.supervised(MODEL, CROSS_ENTROPY, reduction="weighted_mean", **parts)
    metrics = {
        "accuracy": ft.metrics.accuracy(),
        "all": ft.metrics.accuracy(weighted=False),
        "top": ft.metrics.top_k_accuracy(4),
    }
    loader = ft.ArrayLoader(data, size)
    values = ft.evaluate(state(), ft.eval_step(loss_fn, metrics=metrics), loader)
    expected = {
        "accuracy": np.average(HITS, weights=WEIGHT),
        "all": HITS.mean(),
        "loss": np.average(losses64(), weights=WEIGHT),
        "top": 1.0,
    }
    assert values == pytest.approx(expected, rel=1e-5)
    still = ft.train_step(loss_fn, optax.sgd(0.0), metrics=metrics)
    epochs = ft.fit(state(), still, loader, verbose=0).history.epochs
    assert {name: epochs[name][0] for name in expected} == pytest.approx(expected, rel=1e-5)
    population = ft.population.stack([state(), state()])
    step = ft.population.step(ft.eval_step(loss_fn, metrics=metrics))
    np.testing.assert_allclose(
        ft.evaluate(population, step, loader)["accuracy"], [expected["accuracy"]] * 2, rtol=1e-5
    )


@pytest.mark.parametrize("size", [7, 8])
def test_micro_batches_of_a_dict_keep_labels_and_weights(size) -> None:
    # A number belongs to all examples.
    batch = {"image": X, "label": Y, "mask": WEIGHT, "temperature": 0.5, "t": np.float32(2)}
    parts = KEYS | {"inputs": lambda b: b["image"] * b["temperature"] * b["t"]}
    loss_fn = ft.supervised(MODEL, CROSS_ENTROPY, reduction="weighted_mean", **parts)
    small = ft.micro_batches(loss_fn, size)
    step = ft.train_step(small, TX, metrics={"accuracy": ft.metrics.accuracy()})
    metered, logs = jax.jit(step)(step.start(state()), batch)
    accuracy = step.metrics.compute(metered.metrics)["accuracy"]
    np.testing.assert_allclose(accuracy, np.average(HITS, weights=WEIGHT), rtol=1e-6)
    np.testing.assert_allclose(logs["loss"], np.average(losses64(), weights=WEIGHT), rtol=1e-6)


def test_a_dict_is_predicted_from_its_inputs() -> None:
    data = ft.ArrayLoader({"image": X, "label": Y}, 16)
    outputs = ft.predict(state(), ft.predict_step(MODEL, inputs="image"), data)
    np.testing.assert_allclose(outputs, logits64(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"inputs": "image"}, "supervised: expected inputs and labels together"),
        ({"sample_weight": "mask"}, "supervised: expected inputs and labels together"),
        ({"inputs": "no", "labels": "y"}, r"inputs: expected 'no' in .*got \['image', 'y"),
        ({"inputs": 0, "labels": "y"}, "inputs: expected 0 in the batch, got"),
        ({"inputs": "image", "labels": "y/0"}, "labels: expected 'y/0' in the batch, got"),
    ],
)
def test_a_part_that_is_missing_is_named(parts, words) -> None:
    batch = {"image": X, "y": Y}
    with pytest.raises(ValueError, match=words):
        ft.train_step(ft.supervised(MODEL, CROSS_ENTROPY, **parts), TX)(state(), batch)


def own_loss(params, model_state, batch, *, rng, training):
    logits = MODEL.apply(params, model_state, batch["image"]).outputs
    return CROSS_ENTROPY(logits, batch["label"]).mean(), ft.Aux(model_state, logits)


def own_loss_with_labels(params, model_state, batch, **mode):
    loss, aux = own_loss(params, model_state, batch, **mode)
    return loss, aux.replace(labels=batch["label"])


def test_a_loss_of_a_dict_tells_the_metrics_its_labels() -> None:
    share = ft.metrics.mean(lambda outputs, y: y == 1)
    metrics = {"accuracy": ft.metrics.accuracy(), "b": share}
    data = ft.ArrayLoader({"image": X, "label": Y}, 16)
    values = ft.evaluate(state(), ft.eval_step(own_loss_with_labels, metrics=metrics), data)
    assert values["accuracy"] == pytest.approx(HITS.mean())
    named = {"accuracy": ft.metrics.accuracy(labels="label")}
    of_named = ft.evaluate(state(), ft.eval_step(own_loss, metrics=named), data)
    assert of_named["accuracy"] == values["accuracy"]
    assert values["b"] == pytest.approx((Y == 1).mean())
    with pytest.raises(ValueError, match=r"labels: expected labels to compare.*Aux\(labels="):
        ft.evaluate(state(), ft.eval_step(own_loss, metrics=metrics), data)


def test_the_third_part_of_a_tuple_is_no_weight_unless_the_loss_says_so() -> None:
    fold = np.arange(40, dtype=np.int32) % 5

    def loss_fn(params, model_state, batch, **mode):
        x, y, _ = batch
        return own_loss(params, model_state, {"image": x, "label": y}, **mode)

    step = ft.eval_step(loss_fn, metrics={"accuracy": ft.metrics.accuracy()})
    values = ft.evaluate(state(), step, ft.ArrayLoader((X, Y, fold), 16))
    assert values["accuracy"] == pytest.approx(HITS.mean())


@pytest.mark.parametrize("reduction", ["mean", "weighted_mean"])
def test_the_mask_of_tokens_reaches_the_accuracy(reduction) -> None:
    tokens = RNG.integers(0, 11, (12, 6)).astype(np.int32)
    mask = np.arange(6) < RNG.integers(1, 7, 12)[:, None]
    scores = RNG.normal(size=(12, 6, 11)).astype(np.float32)
    model = ft.Model(
        lambda key, x: ({}, {}), lambda p, s, x, *, rng=None, training=False: ft.ModelOutput(x, s)
    )
    loss_fn = ft.supervised(model, CROSS_ENTROPY, reduction=reduction)
    step = ft.eval_step(loss_fn, metrics={"accuracy": ft.metrics.accuracy()})
    for dtype in (bool, np.int32, np.float16):
        data = ft.ArrayLoader((scores, tokens, mask.astype(dtype)), 5)
        empty = ft.TrainState.create(params={}, tx=TX)
        value = ft.evaluate(empty, step, data)["accuracy"]
        assert value == pytest.approx((scores.argmax(-1) == tokens)[mask].mean())


def test_a_loss_may_be_shorter_than_the_outputs() -> None:
    tokens = RNG.integers(0, 5, (8, 6)).astype(np.int32)
    kernel = RNG.normal(size=(5, 5)).astype(np.float32)
    model = ft.Model(
        lambda key, x: ({"k": kernel}, {}),
        lambda p, s, x, *, rng=None, training=False: ft.ModelOutput(p["k"][x], s),
    )

    def next_token(logits, y):
        return CROSS_ENTROPY(logits[:, :-1], y[:, 1:])

    loss_fn = ft.supervised(model, next_token)
    value, _ = loss_fn({"k": kernel}, {}, (tokens, tokens), rng=None, training=True)
    logits = kernel.astype(np.float64)[tokens[:, :-1]]
    picked = np.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(value, (np.log(np.exp(logits).sum(-1)) - picked).mean(), rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: ft.micro_batches(f, 7)])
def test_a_loss_may_return_a_dict_of_logs(wrap) -> None:
    def with_logs(params, model_state, batch, *, rng, training):
        loss, _ = own_loss(params, model_state, batch, rng=rng, training=training)
        return loss, {"twice": 2 * loss, "g": {"loss": loss}}

    batch = {"image": X, "label": Y}
    new, logs = jax.jit(ft.train_step(wrap(with_logs), TX))(state(), batch)
    np.testing.assert_allclose(logs["twice"], 2 * losses64().mean(), rtol=1e-6)
    np.testing.assert_allclose(logs["g"]["loss"], losses64().mean(), rtol=1e-6)
    assert new.model_state == ()
    measure = ft.eval_step(wrap(with_logs), logs=("g/loss", "twice"))
    values = ft.evaluate(state(), measure, ft.ArrayLoader(batch, 7))
    np.testing.assert_allclose(values["g/loss"], losses64().mean(), rtol=1e-6)
    np.testing.assert_allclose(values["twice"], 2 * losses64().mean(), rtol=1e-6)
    expected, _ = jax.jit(ft.train_step(own_loss, TX))(state(), batch)
    chex.assert_trees_all_close(new, expected, rtol=1e-6)


@pytest.mark.parametrize("labels", [np.float32(0), "text", {"a": X}, None, object()])
def test_the_error_of_a_loss_is_the_users_own(labels) -> None:
    class OwnError(RuntimeError):
        pass

    def loss(outputs, y):
        raise OwnError("mine")

    with pytest.raises(OwnError, match="mine"):
        ft.train_step(ft.supervised(MODEL, loss), TX)(state(), (X, labels))
