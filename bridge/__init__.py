"""Keras models in, Keras models out: the bridge between Keras on JAX and functrain.

Importing it before Keras sets `KERAS_BACKEND=jax` where the variable is unset.
"""

from bridge._backend import require_jax

require_jax()  # before anything imports keras: it picks its backend then, once

import functrain  # noqa: E402
from bridge._version import __version__ as __version__  # noqa: E402
from bridge._version import require_same  # noqa: E402

require_same(functrain)  # before a stale functrain can fail on a name it does not have

from bridge._model import create_state as create_state  # noqa: E402
from bridge._model import from_keras as from_keras  # noqa: E402
from bridge._model import to_keras as to_keras  # noqa: E402
from bridge._scope import no_side_effects  # noqa: E402
from functrain.fusion._guards import add_guard  # noqa: E402

add_guard(no_side_effects)

del add_guard, functrain, no_side_effects, require_jax, require_same

__all__ = ["__version__", "create_state", "from_keras", "to_keras"]
