"""The installed wheel, seen from outside the repository: imports, types, and training both ways.

`make test-wheel` runs it with `python -I` in an empty environment and an empty folder.
"""

import importlib.metadata
import importlib.resources
import pathlib
import sys

import bridge
import functrain as ft
import keras
import numpy as np
import optax


def require(holds: bool, what: str) -> None:
    """Ends with a line if something does not hold."""
    if not holds:
        sys.exit(f"the installed wheel: expected {what}")


for package in (ft, bridge):
    where = pathlib.Path(package.__file__).resolve()
    require("site-packages" in where.parts, f"{package.__name__} in site-packages, got {where}")
    typed = importlib.resources.files(package) / "py.typed"
    require(typed.is_file(), f"{package.__name__}/py.typed")
    require(package.__version__ == importlib.metadata.version("functrain"), "one version")
files = {str(file).split("/")[0] for file in importlib.metadata.files("functrain") or ()}
packages = {name for name in files if not name.endswith(".dist-info")}
require(packages == {"functrain", "bridge"}, f"two packages, got {sorted(packages)}")

rng = np.random.default_rng(0)
x = rng.normal(size=(512, 8)).astype(np.float32)
y = (x @ rng.normal(size=(8, 3))).argmax(-1).astype(np.int32)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)])

tx = optax.adam(1e-2)
loss_fn = ft.supervised(bridge.from_keras(model), optax.softmax_cross_entropy_with_integer_labels)
step = ft.train_step(loss_fn, tx, metrics={"accuracy": ft.metrics.accuracy()})
loader = ft.ArrayLoader((x, y), 32, shuffle=True)
state, history = ft.fit(bridge.create_state(model, tx), step, loader, epochs=10, verbose=0)
reached = history.epochs["accuracy"][-1]
require(reached > 0.9, f"an accuracy above 0.9 from functrain.fit, got {reached}")

bridge.to_keras(state, model).save("model.keras")
again = keras.models.load_model("model.keras")
again.compile(
    "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
)
logs = bridge.fit(again, x, y, epochs=1, verbose=0).history
require(logs["accuracy"][0] > 0.9, f"bridge.fit to go on from there, got {logs}")
print(f"functrain {ft.__version__} from the wheel: trained to {reached:.3f}, saved, and resumed")
