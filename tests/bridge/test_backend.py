"""Importing bridge: on JAX or not at all."""

import os
import subprocess
import sys

import pytest

import bridge


def python(code: str, **env: str | None) -> subprocess.CompletedProcess[str]:
    full = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **env}
    full = {key: value for key, value in full.items() if value is not None}
    return subprocess.run([sys.executable, "-c", code], env=full, capture_output=True, text=True)


def test_an_unset_backend_becomes_jax():
    done = python("import bridge, keras; print(keras.config.backend())", KERAS_BACKEND=None)
    assert done.stdout == "jax\n", done.stderr


def test_another_backend_in_the_environment_is_refused_before_keras_is_imported():
    code = "import sys\ntry:\n  import bridge\nfinally: print('keras' in sys.modules)"
    done = python(code, KERAS_BACKEND="torch")
    assert done.stdout == "False\n"
    expected = "RuntimeError: KERAS_BACKEND: expected 'jax', got 'torch' in the environment"
    assert expected in done.stderr
    assert "export KERAS_BACKEND=jax" in done.stderr


@pytest.mark.parametrize("variable", ["numpy", None])
def test_keras_already_on_another_backend_is_refused(tmp_path, variable):
    # Keras's numpy backend needs nothing installed.
    (tmp_path / "keras.json").write_text('{"backend": "numpy"}')
    done = python("import keras, bridge", KERAS_BACKEND=variable, KERAS_HOME=str(tmp_path))
    expected = (
        "RuntimeError: keras: expected its 'jax' backend, got 'numpy', and keras was imported"
    )
    assert expected in done.stderr
    assert "`import bridge` before keras" in done.stderr
    assert "set KERAS_BACKEND=jax before Python starts" in done.stderr


def test_bridge_imports_where_keras_has_failed_for_want_of_tensorflow():
    # Nothing of ours runs before that failure: Keras takes TensorFlow where nobody says otherwise.
    code = """
import sys
sys.modules["tensorflow"] = None  # not installed
try:
    import keras
except ImportError:
    import bridge, keras
    print(keras.config.backend(), float(keras.Variable(1.0).value))
"""
    nowhere = os.devnull  # no keras.json there
    done = python(code, KERAS_BACKEND=None, KERAS_HOME=nowhere)
    assert done.stdout == "jax 1.0\n", done.stderr


def test_all_names_what_is_public():
    assert bridge.__all__ == sorted(bridge.__all__)
    rooms = {name for name in vars(bridge) if f"bridge.{name}" in sys.modules}
    public = {name for name in vars(bridge) if not name.startswith("_")} - rooms
    assert public == set(bridge.__all__) - {"__version__"}
