"""Which process this is: JAX does not survive a fork."""

import os

_user: int | None = None


def require_own_jax() -> None:
    """Refuses to run in a child that was forked after functrain had used JAX.

    Raises:
      RuntimeError: It is one: JAX's threads are in the parent only, and the first program would
        wait for them for ever.
    """
    global _user
    if _user is None:
        _user = os.getpid()
    elif _user != os.getpid():
        raise RuntimeError(
            "expected a process in which JAX can run, got a child that was forked from one which "
            "had used it: it would hang. Start processes with "
            "multiprocessing.get_context('spawn')."
        )
