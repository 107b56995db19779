"""What is wrong with a checkpoint."""


class CheckpointCorruptError(RuntimeError):
    """A checkpoint is damaged: a file is missing, cannot be read, or holds other bytes.

    The message names the leaves. Nothing of it is returned.

    Examples:
      >>> issubclass(CheckpointCorruptError, RuntimeError)
      True
    """


class CheckpointMismatchError(ValueError):
    """A checkpoint is whole, but not of this program: other leaves, other data, another format.

    The message names what differs, as it was saved and as it was expected. Nothing was loaded.

    Examples:
      >>> issubclass(CheckpointMismatchError, ValueError)
      True
    """
