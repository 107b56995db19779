"""A fit of Keras models over several processes with four devices in all; see test_fit_processes.py.

python processes.py numbers|parts|going_on|refusals|stopping DIRECTORY [DISTRIBUTIONS, OR A STEP]
"""

import json
import os
import signal
import sys
import time
from typing import Any

import bridge  # isort: skip
import jax
import keras
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from keras import layers

import functrain as ft

PROCESSES = int(os.environ.get("JAX_NUM_PROCESSES", 1))
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 8)).astype(np.float32)
Y = RNG.normal(size=(64, 4)).astype(np.float32)


def tell(name: str, value: Any) -> None:
    sys.stdout.write(f"{name} {json.dumps(value)}\n")  # at once: C++ writes, too
    sys.stdout.flush()


def data_parallel() -> Any:
    return keras.distribution.DataParallel()


def model_parallel() -> Any:
    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], devices)
    layout = keras.distribution.LayoutMap(mesh)
    layout[".*dense.*kernel"] = (None, "model")
    layout[".*dense.*bias"] = ("model",)
    return keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")


def by_rule() -> Any:
    mesh = ft.sharding.mesh({"data": 2, "model": 2})
    rule = ft.sharding.rules({"**/kernel": P("data", "model"), "**": ft.sharding.replicated})
    return bridge.to_distribution(mesh, rule)


def fresh(optimizer: Any = "adam") -> keras.Model:
    keras.utils.set_random_seed(0)
    net = [keras.Input((8,)), layers.Dense(8, "relu"), layers.BatchNormalization()]
    model = keras.Sequential([*net, layers.Dropout(0.2), layers.Dense(4)])
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def optimizer(make: Any) -> Any:
    return bridge.OptaxOptimizer(optax.adam, learning_rate=1e-3) if make is by_rule else "adam"


def numbers(folder: str, *names: str) -> None:
    """Everything that a model goes through, with some distributions."""
    for make in (globals()[name] for name in names):
        with make().scope():
            model = fresh(optimizer(make))
            log = keras.callbacks.CSVLogger(f"{folder}/{make.__name__}.csv")
            how: Any = {"batch_size": 8, "epochs": 2, "verbose": 2, "callbacks": [log]}
            history = bridge.fit(model, X, Y, **how, validation_data=(X[:16], Y[:16]))
            outputs = bridge.predict(model, X, batch_size=8, verbose=0)
            evaluated = bridge.evaluate(model, X, Y, batch_size=8, verbose=0)
            found = [*history.history.values(), evaluated, np.abs(outputs).mean(0).tolist()]
            shards = model.layers[0].kernel.value.addressable_shards
            tell(make.__name__, [found, shards[0].data.nbytes])
        home = fresh()
        bridge.to_keras(bridge.create_state(model, optax.identity()), home)
        assert all(v.value.is_fully_addressable for v in home.variables)
        theirs = home.predict(X, batch_size=8, verbose=0)
        np.testing.assert_allclose(theirs, outputs, rtol=1e-4, atol=1e-5)


def parts(folder: str) -> None:
    """Each process reads its part of the data."""
    import grain

    own, count = jax.process_index(), jax.process_count()

    def batches(rows: int = 64) -> Any:
        pairs = list(zip(X[:rows], Y[:rows], strict=True))
        return grain.MapDataset.source(pairs)[own::count].batch(8 // count)

    with data_parallel().scope():
        keras.utils.set_random_seed(0)
        net = [keras.Input((8,)), layers.Dense(8, "relu"), layers.BatchNormalization()]
        model = keras.Sequential([*net, layers.Dense(4)])
        model.compile("adam", "mse", metrics=["mae"])
        rows = jax.NamedSharding(model.layers[0].kernel.value.sharding.mesh, P("batch"))

        def local(data: Any) -> Any:
            return ft.distributed.local(data, rows)

        how: Any = {"verbose": 0, "shuffle": False}
        more: Any = {"epochs": 2, "validation_data": local(batches(16)), **how}
        found = list(bridge.fit(model, local(batches()), **more).history.values())
        arrays = local(X[own::count]), Y[own::count]
        again = bridge.fit(model, *arrays, batch_size=8 // count, **how)
        found += list(again.history.values())
        found.append(bridge.evaluate(model, local(batches()), verbose=0))
        outputs = bridge.predict(model, local(X[own::count]), batch_size=8 // count, verbose=0)
        tell("parts", [*found, np.abs(outputs).mean(0).tolist()])
        try:
            bridge.fit(model, local(batches(64 - 8 * own)), **how)
        except ValueError as error:
            tell("refused", str(error))


def going_on(folder: str, fatal: str = "0") -> None:
    """A fit that saves itself; SIGTERM comes to the last process at a step, if that is said."""

    class Terminate(keras.callbacks.Callback):
        chunk_safe, step = True, 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.step += 1
            time.sleep(0.03)  # JAX looks once a second whether SIGTERM has come
            if self.step == int(fatal) and jax.process_index() == PROCESSES - 1:
                os.kill(os.getpid(), signal.SIGTERM)

    keras.distribution.set_distribution(model_parallel())
    log = keras.callbacks.CSVLogger(f"{folder}.csv")
    saved = ft.Checkpointer(folder, every=ft.every(steps=1000))
    how: Any = {"callbacks": [Terminate(), log], "checkpointer": saved, "fuse": 3, "verbose": 0}
    tell("ends", bridge.fit(fresh(), X, Y, batch_size=8, epochs=12, **how).history)


def stopping(folder: str) -> None:
    """A callback stops the training within an epoch and at the end of one, in some processes."""

    class Stop(keras.callbacks.Callback):
        chunk_safe, steps = True, 0

        def __init__(self, processes: set[int], step: int = 0, epoch: int = -1) -> None:
            super().__init__()
            self.is_here, self.step, self.epoch = jax.process_index() in processes, step, epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            self.model.stop_training |= self.is_here and self.steps == self.step

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training |= self.is_here and epoch == self.epoch

    keras.distribution.set_distribution(data_parallel())
    both = {0, 1}
    stops = {
        "in_both": Stop(both, step=12),
        "in_the_second": Stop({1}, step=12),
        "at_an_epoch_of_both": Stop(both, epoch=1),
        "at_an_epoch_of_the_first": Stop({0}, epoch=1),
    }
    how = {"batch_size": 8, "epochs": 4, "fuse": 2, "verbose": 0}
    for name, stop in stops.items():
        history = bridge.fit(fresh(), X, Y, callbacks=[stop], **how)
        tell(name, [stop.steps, history.history["loss"]])


def refusals(folder: str) -> None:
    """What several processes cannot do: each of them says so."""

    def refused(x: Any = X, y: Any = Y, size: int = 8, **how: Any) -> None:
        try:
            bridge.fit(model, x, y, batch_size=size, verbose=0, **how)
        except ValueError as error:
            tell("refused", str(error))

    model = fresh()
    refused()
    keras.distribution.set_distribution(model_parallel())
    model = fresh()
    refused(callbacks=[keras.callbacks.BackupAndRestore(folder)])
    refused(callbacks=[keras.callbacks.ModelCheckpoint(f"{folder}/x.weights.h5")])
    refused(X[:13], Y[:13])
    refused(X + jax.process_index(), Y)
    refused(X, Y + jax.process_index())
    np.random.seed(jax.process_index())
    refused()


if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 // PROCESSES}"
    ft.distributed.initialize()
    what = {f.__name__: f for f in (numbers, going_on, refusals, parts, stopping)}
    what[sys.argv[1]](*sys.argv[2:])
