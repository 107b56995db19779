"""SIGTERM with several processes: JAX receives it, and all of them end at the same step."""

import itertools

import jax

# JAX identifies a call by its number, which must be the same in all processes, and one higher at
# each call, across all runs of a process.
_call_numbers = itertools.count(1)


def is_enabled() -> bool:
    """Returns True if JAX's preemption service is active: it then handles SIGTERM itself."""
    is_configured = getattr(jax.config, "jax_enable_preemption_service", True)
    return bool(jax.process_count() > 1 and is_configured)


def is_time_to_end() -> bool:
    """Returns True if a process got SIGTERM, and all processes have reached the step to end at.

    All processes must call this after the same events. It does not wait: a few events pass until
    the processes have agreed on one that none of them has passed. If a process is killed meanwhile,
    JAX notices that it is gone and ends the others.
    """
    # Only runs with several processes need this module.
    from jax.experimental import multihost_utils

    return bool(multihost_utils.reached_preemption_sync_point(next(_call_numbers)))
