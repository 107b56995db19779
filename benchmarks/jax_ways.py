"""The ways of functrain and bridge, and training loops written by hand in JAX."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import bridge
import functrain as ft
from benchmarks.keras_ways import Run, compiled, fitting, predicting
from benchmarks.workloads import Workload

# The sums over an epoch of the loss and of the accuracy ("hits").
Totals = dict[str, jax.Array]


def adam() -> optax.GradientTransformation:
    """Returns the optimizer of every way, Adam with the epsilon of Keras."""
    return optax.adam(1e-3, eps=1e-7)


# The ways of functrain and bridge.


def functrain_parts(workload: Workload) -> tuple[Any, Any]:
    """Returns the state and the step of a workload."""
    if workload.own_step:
        return workload.functrain_step()
    net = workload.model()
    state = bridge.create_state(net, adam())
    loss = optax.softmax_cross_entropy_with_integer_labels
    loss_fn = ft.supervised(bridge.from_keras(net), loss)
    return state, ft.train_step(loss_fn, adam(), metrics={"accuracy": ft.metrics.accuracy()})


def functrain_fit(workload: Workload, rewrites: Any = "auto") -> Run:
    """Returns a run of `functrain.fit`, including data loading, metrics and history."""
    state, step = functrain_parts(workload)
    loader = ft.ArrayLoader(workload.data(), workload.batch)

    def run() -> float:
        nonlocal state
        state, history = ft.fit(state, step, loader, rewrites=rewrites, verbose=0)
        return float(history.epochs["loss"][-1])

    return run


def functrain_off(workload: Workload) -> Run:
    """Returns a run of `functrain.fit` without rewrites of slow operations."""
    return functrain_fit(workload, rewrites="off")


def functrain_fused(workload: Workload) -> Run:
    """Returns a run of only the fused program, on chunks that are already on the device."""
    state, step = functrain_parts(workload)
    k = min(workload.steps, 128)
    loader = ft.ArrayLoader(workload.data(), workload.batch)
    chunks = [jax.device_put(loader.chunk(0, i, k)) for i in range(0, workload.steps, k)]
    fused = ft.fuse(step, k)

    def run() -> float:
        nonlocal state
        carry = step.start(state) if isinstance(step, ft.MeteredStep) else state
        losses = []
        for chunk in chunks:
            carry, logs = fused(carry, chunk)
            losses.append(logs["loss"])
        state = carry.state if isinstance(carry, ft.metrics.Metered) else carry
        jax.block_until_ready(state)
        return float(np.mean(jax.device_get(losses)))

    return run


def bridge_fit(workload: Workload, verbose: int = 0) -> Run:
    """Returns a run of `bridge.fit` on arrays in memory: Keras's own step, fused."""
    return fitting(compiled(workload), workload, bridge.fit, verbose)


def bridge_fit_bar(workload: Workload) -> Run:
    """Returns a run of `bridge.fit` with Keras's progress bar."""
    return bridge_fit(workload, verbose=1)


def functrain_predict(workload: Workload) -> Run:
    """Returns a run of `functrain.predict` with a converted Keras model."""
    net = workload.model()
    state = bridge.create_state(net, adam())
    step = ft.predict_step(bridge.from_keras(net))
    return predicting(
        workload, lambda x: ft.predict(state, step, ft.ArrayLoader(x, workload.batch))
    )


def bridge_predict(workload: Workload) -> Run:
    """Returns a run of `bridge.predict` with the compiled Keras model."""
    model = compiled(workload)
    return predicting(
        workload, lambda x: bridge.predict(model, x, batch_size=workload.batch, verbose=0)
    )


# Loops written by hand.


def by_hand(workload: Workload) -> tuple[Any, Any]:
    """Returns the carry (state, totals) and ``step(carry, batch) -> carry``."""
    if workload.own_step:
        return own_by_hand(workload)
    model, tx = workload.model(), adam()

    def loss_fn(params: Any, rest: Any, batch: Any) -> Any:
        x, y = batch
        logits, rest = model.stateless_call(params, rest, x, training=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, (rest, jnp.mean(jnp.argmax(logits, -1) == y))

    def step(carry: Any, batch: Any) -> Any:
        (params, rest, opt_state), totals = carry
        grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (rest, hits)), grads = grad_fn(params, rest, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        totals = {"loss": totals["loss"] + loss, "hits": totals["hits"] + hits}
        return (params, rest, opt_state), totals

    params = [jnp.copy(v.value) for v in model.trainable_variables]
    rest = [jnp.copy(v.value) for v in model.non_trainable_variables]
    return ((params, rest, tx.init(params)), zero_totals()), step


def own_by_hand(workload: Workload) -> tuple[Any, Any]:
    """Returns the same for a workload with `own_step`."""
    state, own_step = workload.functrain_step()

    def step(carry: Any, batch: Any) -> Any:
        state, totals = carry
        state, logs = own_step(state, batch)
        return state, {**totals, "loss": totals["loss"] + logs["loss"]}

    return (state, zero_totals()), step


def zero_totals() -> Totals:
    """Returns zeros, as separate arrays, because a buffer cannot be donated twice."""
    return {"loss": jnp.zeros(()), "hits": jnp.zeros(())}


def jit_loop(workload: Workload) -> Run:
    """Returns a Python loop over NumPy batches with a jitted step that donates its carry."""
    carry, step = by_hand(workload)
    step = jax.jit(step, donate_argnums=0)
    x, y = workload.data()

    def run() -> float:
        nonlocal carry
        carry = (carry[0], zero_totals())
        for i in range(0, len(x), workload.batch):
            carry = step(carry, (x[i : i + workload.batch], y[i : i + workload.batch]))
        jax.block_until_ready(carry)
        return float(carry[1]["loss"]) / workload.steps

    return run


def scan(workload: Workload) -> Run:
    """Returns a `lax.scan` of the same step over an epoch that is already on the device."""
    carry, step = by_hand(workload)
    epoch = _stacked(workload, workload.steps)[0]

    def all_steps(carry: Any, epoch: Any) -> Any:
        return jax.lax.scan(lambda carry, batch: (step(carry, batch), None), carry, epoch)[0]

    program = jax.jit(all_steps, donate_argnums=0)

    def run() -> float:
        nonlocal carry
        carry = program((carry[0], zero_totals()), epoch)
        jax.block_until_ready(carry)
        return float(carry[1]["loss"]) / workload.steps

    return run


def keras_scan_32(workload: Workload) -> Run:
    """Returns a scan of Keras's `train_step`, as Keras 3.16 does for steps_per_execution."""
    chunks = _stacked(workload, min(32, workload.steps))
    first_batch = jax.tree.map(lambda leaf: leaf[0], chunks[0])
    (*training_state, metrics), program = keras_scan(compiled(workload), first_batch)

    def run() -> float:
        nonlocal training_state
        state = (*training_state, jax.tree.map(jnp.copy, metrics))
        for chunk in chunks:
            state, loss = program(state, chunk)
        training_state = state[:3]
        jax.block_until_ready(training_state)
        return float(loss)

    return run


def keras_scan(model: Any, batch: Any) -> tuple[Any, jax.stages.Wrapped]:
    """Returns the state of a compiled Keras model, and a jitted scan of its `train_step`."""
    _build(model, *batch)

    def step(state: Any, batch: Any) -> Any:
        logs, state = model.train_step(state, batch)
        return state, logs

    def steps(state: Any, chunk: Any) -> Any:
        state, logs = jax.lax.scan(step, state, chunk)
        return state, logs["loss"][-1]

    return _keras_state(model), jax.jit(steps, donate_argnums=0)


def _build(model: Any, x: Any, y: Any) -> None:
    """Creates the variables that `fit` would create, without training the model."""
    model.optimizer.build(model.trainable_variables)
    outputs = jax.eval_shape(lambda: model.stateless_call(*_keras_state(model)[:2], x)[0])
    outputs = jnp.zeros(outputs.shape, outputs.dtype)
    model.compute_loss(x, y, outputs)
    model.compute_metrics(x, y, outputs)
    model.reset_metrics()


def _keras_state(model: Any) -> tuple[list[jax.Array], ...]:
    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        model.optimizer.variables,
        model.metrics_variables,
    )
    return tuple([jnp.copy(v.value) for v in part] for part in variables)


def _stacked(workload: Workload, k: int) -> list[Any]:
    """Returns the epoch as chunks of K batches, on the device."""
    loader = ft.ArrayLoader(workload.data(), workload.batch)
    return [jax.device_put(loader.chunk(0, i, k)) for i in range(0, workload.steps, k)]


def jit_predict(workload: Workload) -> Run:
    """Returns a Python loop with a jitted model, whose outputs are fetched at the end."""
    model = workload.model()
    variables = [[v.value for v in model.trainable_variables]]
    variables += [[v.value for v in model.non_trainable_variables]]
    apply = jax.jit(lambda variables, x: model.stateless_call(*variables, x)[0])

    def predict(x: np.ndarray) -> np.ndarray:
        batches = (x[i : i + workload.batch] for i in range(0, len(x), workload.batch))
        return np.concatenate([apply(variables, batch) for batch in batches])

    return predicting(workload, predict)
