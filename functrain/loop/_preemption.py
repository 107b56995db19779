"""SIGTERM where there are several processes: JAX hears it, and all of them end at the same step."""

import itertools

import jax

# JAX wants the same number in all processes, one higher each time, through all runs of a process.
_numbers = itertools.count(1)


def is_heard() -> bool:
    """Whether JAX's preemption service listens: it keeps SIGTERM for itself then."""
    listens = getattr(jax.config, "jax_enable_preemption_service", True)
    return bool(jax.process_count() > 1 and listens)


def is_time_to_end() -> bool:
    """Whether one of the processes got SIGTERM, and all of them are at the step to end at.

    All of them ask, after the same events. It waits for nobody: some events go by until they have
    agreed on one that none has passed. A process that is killed ends the others by its silence.
    """
    from jax.experimental import multihost_utils

    return bool(multihost_utils.reached_preemption_sync_point(next(_numbers)))
