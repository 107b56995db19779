"""Which epochs of `fit` end with an evaluation."""

from typing import Any


def is_due(epoch: int, validation_freq: Any) -> bool:
    """Whether an epoch, counted from 0, ends with an evaluation.

    Args:
      epoch: The epoch.
      validation_freq: How many epochs from one evaluation to the next; or a list of those that
        have one, counted from 1.

    Raises:
      ValueError: `validation_freq` is neither.
    """
    if isinstance(validation_freq, int):
        return (epoch + 1) % validation_freq == 0
    if isinstance(validation_freq, list):
        return epoch + 1 in validation_freq
    raise ValueError(
        "validation_freq: expected a number of epochs, or a list of epochs counted from 1, got "
        f"{validation_freq!r}"
    )
