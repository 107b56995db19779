"""Errors of checkpoints, and the checks that raise them."""

import contextlib
import errno
from collections.abc import Iterator

# Errors of parsing a file that was damaged or crafted: deep nesting ends in a RecursionError, and
# a saved tensor in an ImportError if PyTorch is missing.
PARSE_ERRORS = (
    *(ArithmeticError, AttributeError, ImportError, LookupError, OSError),
    *(RecursionError, TypeError, ValueError),
)
# Errors that say nothing about the bytes of a file.
_REFUSALS = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOENT, errno.ENOMEM)


class CheckpointCorruptError(RuntimeError):
    """A checkpoint is damaged: a file is missing, unreadable, or has other bytes than were saved.

    The message names the leaves. Nothing of the checkpoint is returned.

    Examples:
      >>> issubclass(CheckpointCorruptError, RuntimeError)
      True
    """


class CheckpointMismatchError(ValueError):
    """A checkpoint is intact, but does not fit: it has other leaves, other data, another format.

    The message names the differences, as saved and as expected. Nothing was loaded.

    Examples:
      >>> issubclass(CheckpointMismatchError, ValueError)
      True
    """


class ObjectStoreError(RuntimeError):
    """An object store, such as ``gs://`` or ``s3://``, refused a request or could not be reached.

    The message is that of its client. It says nothing about the checkpoint, which may be intact.

    Examples:
      >>> issubclass(ObjectStoreError, RuntimeError)
      True
    """


@contextlib.contextmanager
def corrupt_on(*errors: type[Exception], expected: str) -> Iterator[None]:
    """Context manager that turns errors of a reader into a CheckpointCorruptError.

    Its message begins with `expected`, such as ``"PATH: expected ..."``.
    """
    try:
        yield
    except CheckpointMismatchError:  # a ValueError, which `errors` may contain
        raise
    except errors as error:
        if isinstance(error, OSError) and error.errno in _REFUSALS:
            raise
        # Parsers quote their input, which can be megabytes long.
        reason = getattr(error, "strerror", None) or str(error)[:200]
        raise CheckpointCorruptError(
            f"{expected}, got unreadable data: {reason.rstrip('.')}. It is damaged, cut short, or "
            "not of the format in its name: take another."
        ) from error
