"""Keras must run on JAX: the first thing checked, before anything else can fail."""

import os
import sys

_HOW = """\
bridge needs Keras on its JAX backend, and Keras picks its backend once, at `import keras`. Do one \
of these, then restart Python:
  - `export KERAS_BACKEND=jax` in the shell
  - `os.environ["KERAS_BACKEND"] = "jax"` before the first `import keras`
  - `import bridge` before the first `import keras` (it sets the variable where it is unset)
  - `"backend": "jax"` in ~/.keras/keras.json"""


def require_jax() -> None:
    """Makes Keras's backend JAX where nothing has been chosen yet, and refuses any other choice.

    With Keras not yet imported and `KERAS_BACKEND` unset, sets `os.environ["KERAS_BACKEND"]` to
    `"jax"`. Does not import Keras.

    Raises:
      RuntimeError: `KERAS_BACKEND` names another backend, or Keras runs on one already.

    Examples:
      >>> require_jax()  # Keras runs on JAX here, so this says nothing
    """
    keras = sys.modules.get("keras")
    if keras is not None:
        found = keras.config.backend()
        if found != "jax":
            raise RuntimeError(f"Keras is already imported, on its {found!r} backend. {_HOW}")
        return
    found = os.environ.setdefault("KERAS_BACKEND", "jax")
    if found != "jax":
        raise RuntimeError(f"the environment has KERAS_BACKEND={found!r}. {_HOW}")
