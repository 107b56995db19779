"""Reader of Orbax checkpoints: of a StandardCheckpointer, a CheckpointManager, or Keras.

Orbax's own restore reads a tree at once. Here each leaf is read by itself, or a part of it, through
TensorStore, the library that Orbax stores arrays with. The files are described in
https://orbax.readthedocs.io/en/latest/guides/checkpoint/checkpoint_format.html.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import jax
import numpy as np

from functrain.checkpoint._array_files import ArrayFile
from functrain.checkpoint._errors import PARSE_ERRORS, CheckpointMismatchError, corrupt_on
from functrain.checkpoint._files import files_at
from functrain.checkpoint._leaves import Index
from functrain.common import _tree
from functrain.common._checks import require
from functrain.common._library import import_optional

METADATA = "_METADATA"


def find_items(path: str) -> dict[str, str]:
    """Returns the directories with arrays of an Orbax checkpoint by their names; {} for no such.

    Of the directory of a CheckpointManager, those of the newest step.
    """
    files = files_at(path)
    # A tree, its items or their steps: the fewest levels at which there is metadata.
    for depth in range(3):
        names = files.find(path, "/".join(["*"] * depth + [METADATA]))
        items = [os.path.dirname(name) for name in names if ".orbax-checkpoint-tmp" not in name]
        if items:
            items = _of_newest_step(items)
            is_one = len({*map(os.path.basename, items)}) == len(items)
            advice, error = "Pass the path of one of them.", CheckpointMismatchError
            require(is_one, path, "one checkpoint", items, advice, error=error)
            return {os.path.basename(x): os.path.join(path, x) if x else path for x in items}
    return {}


def _of_newest_step(items: list[str]) -> list[str]:
    """Returns the items of the newest step if all are in directories of steps; else all."""
    steps = {name: _step(name) for name in (item.split("/")[0] for item in items)}
    if None in steps.values():
        return items
    newest = max(steps, key=lambda name: steps[name] or 0)
    return [item for item in items if item.split("/")[0] == newest]


def _step(name: str) -> int | None:
    """Returns the step in the name of a directory, such as ``12`` or ``step_12``."""
    match = re.fullmatch(r"(?:.*_)?(\d+)", name)
    return int(match[1]) if match else None


@contextlib.contextmanager
def open_orbax(items: Mapping[str, str]) -> Iterator[ArrayFile]:
    """Opens the items of a checkpoint. Where several have arrays, paths begin with the item."""
    by_item: dict[str, dict[str, _Array]] = {}
    for item, directory in items.items():
        with corrupt_on(
            *PARSE_ERRORS, expected=f"{directory}: expected an intact Orbax checkpoint"
        ):
            if arrays := _open_item(directory):
                by_item[item] = arrays
    arrays_by_path = {
        f"{item}/{path}" if len(by_item) > 1 else path: array
        for item, arrays in by_item.items()
        for path, array in arrays.items()
    }

    def read(name: str, index: Index | None = None) -> np.ndarray:
        array = arrays_by_path[name].stored
        with corrupt_on(*PARSE_ERRORS, expected=f"{name}: expected an intact Orbax checkpoint"):
            part: np.ndarray = (array if index is None else array[index]).read().result()
        return part

    yield ArrayFile({name: array.spec for name, array in arrays_by_path.items()}, read)


class _Array(NamedTuple):
    """An array of TensorStore, which is not read yet; of a random key its key data."""

    stored: Any
    key_impl: str | None

    @property
    def spec(self) -> str:
        """Returns its dtype and shape, such as ``float32[8, 3]`` or ``key<fry>[]``."""
        like = jax.ShapeDtypeStruct(self.stored.shape, self.stored.dtype.numpy_dtype)
        if self.key_impl is not None:
            like = jax.eval_shape(lambda x: jax.random.wrap_key_data(x, impl=self.key_impl), like)
        return _tree.strong_spec(like)


def _key_impls(directory: str) -> dict[str, str]:
    """Returns the implementations of random keys, by the names of their arrays."""
    files = files_at(directory)
    notes = [files.read(f"{directory}/{x}") for x in files.find(directory, "array_metadatas/*")]
    arrays = [x["array_metadata"] for note in notes for x in json.loads(note)["array_metadatas"]]
    extras = {x["param_name"]: x.get("ext_metadata") or {} for x in arrays}
    return {name: x["random_key_impl"] for name, x in extras.items() if "random_key_impl" in x}


def _open_item(directory: str) -> dict[str, _Array]:
    """Returns the arrays of a directory, which are not read yet, by path."""
    to_install = "Orbax checkpoints need the library: pip install 'functrain[orbax]'"
    tensorstore = import_optional("tensorstore", to_install)
    metadata = json.loads(files_at(directory).read(f"{directory}/{METADATA}"))
    url = quote(directory if "://" in directory else f"file://{directory}", safe=":/")
    # Orbax notes if chunks of one value are stored, too: then one that is missing is damage.
    fills = not metadata.get("store_array_data_equal_to_fill_value", False)
    options = {"driver": "zarr3" if metadata.get("use_zarr3") else "zarr"}
    pending, impls = {}, _key_impls(directory)
    for entry in metadata["tree_metadata"].values():
        value = entry["value_metadata"]
        if value["skip_deserialize"] or value["value_type"] == "string":
            continue
        keys = [str(key["key"]) for key in entry["key_metadata"]]
        name = ".".join(keys)
        store = _store(f"{url}/{quote(name)}/")
        if metadata.get("use_ocdbt", True):
            store = {"driver": "ocdbt", "base": _store(f"{url}/"), "path": f"{name}/"}
        spec = options | {"kvstore": store, "fill_missing_data_reads": fills}
        path = "/".join(keys)  # as of {"a/b": x, "a": {"b": y}}
        error = CheckpointMismatchError
        require(path not in pending, directory, f"one array at {path}", 2, error=error)
        pending[path] = tensorstore.open(spec, read=True, open=True), impls.get(name)
    return {path: _Array(array.result(), impl) for path, (array, impl) in pending.items()}


def _store(url: str) -> Any:
    """Returns TensorStore's access to a URL."""
    # TensorStore takes all of boto's settings from the environment but this one.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if not url.startswith("s3://") or not endpoint:
        return url
    bucket, _, path = unquote(url).removeprefix("s3://").partition("/")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    location = {"bucket": bucket, "path": path, "endpoint": endpoint, "aws_region": region}
    return {"driver": "s3"} | location
