"""A place for checkpoints: on disk, and in an object store."""

import contextlib
import pathlib
import uuid
from collections.abc import Iterator

import pytest

from tests.checkpoint.storages import STORE


@pytest.fixture
def url() -> Iterator[str]:
    """A place in fsspec's store in memory. test_stores.py has emulations of S3 and Google's."""
    name = f"memory://bucket-{uuid.uuid4().hex}"
    yield f"{name}/run"
    with contextlib.suppress(FileNotFoundError):
        STORE.rm(name, recursive=True)


@pytest.fixture(params=["disk", "store"])
def place(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    """A place in each storage."""
    is_disk = request.param == "disk"
    return str(tmp_path / "run") if is_disk else str(request.getfixturevalue("url"))
