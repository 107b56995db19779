"""bridge.fit with a checkpointer in a process that is asked to end."""

import os
import signal
import subprocess
import sys
import time

import functrain as ft
from tests import fork_server

SCRIPT = """
import bridge, functrain as ft, keras, numpy as np, pathlib, sys
x = np.ones((640, 6), np.float32)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")

class Ready(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        pathlib.Path(sys.argv[2]).touch()

checkpoints = ft.Checkpointer(sys.argv[1], every=ft.every(steps=10**6))
bridge.fit(model, x, x[:, :1], batch_size=8, epochs=10**6, fuse=4, verbose=0,
           callbacks=[Ready()], checkpointer=checkpoints)
"""


def test_sigterm_saves_and_ends_with_143(tmp_path) -> None:
    ready = tmp_path / "ready"
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "c"), str(ready)]
    environment = {**os.environ, "KERAS_BACKEND": "jax"}
    with fork_server.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not ready.exists() and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    checkpoints = ft.Checkpointer(tmp_path / "c")
    assert checkpoints.latest() is not None
    assert checkpoints.verify() == {}
