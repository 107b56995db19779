"""The check that Keras runs on JAX, made before anything imports Keras."""

import os
import sys

_REMEDY = """\
Keras chooses its backend once, at the first `import keras`, and takes TensorFlow unless told \
otherwise. Restart Python, and do one of these:
  - `import bridge` before keras (this sets KERAS_BACKEND=jax if the variable is unset)
  - set KERAS_BACKEND=jax before Python starts: `export KERAS_BACKEND=jax` in the shell
  - `os.environ["KERAS_BACKEND"] = "jax"` before the first `import keras`
  - `"backend": "jax"` in ~/.keras/keras.json"""


def require_jax() -> None:
    """Sets `KERAS_BACKEND=jax` if no backend has been chosen yet; raises RuntimeError for another.

    Does not import Keras.

    Raises:
      RuntimeError: `KERAS_BACKEND` names another backend, or Keras already runs on one.

    Examples:
      >>> require_jax()  # Keras runs on JAX here, so nothing is raised
    """
    keras = sys.modules.get("keras")
    # Where TensorFlow is missing, `import keras` before bridge fails before any code of ours runs.
    # Python then removes keras from sys.modules, so that importing bridge and keras afterwards in
    # the same process works.
    if keras is None:
        backend = os.environ.setdefault("KERAS_BACKEND", "jax")
        problem = f"KERAS_BACKEND: expected 'jax', got {backend!r} in the environment."
    else:
        backend = keras.config.backend()
        problem = (
            f"keras: expected its 'jax' backend, got {backend!r}, and keras was imported before "
            "bridge could set it."
        )
    if backend != "jax":
        raise RuntimeError(f"{problem} {_REMEDY}")
