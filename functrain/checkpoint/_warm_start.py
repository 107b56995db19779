"""Parts of a state from a file: warm starts, transfer learning, new heads.

No file is trusted: nothing is unpickled, no code is run, and no memory is taken for an array before
its shape and dtype are known to be those of the state.
"""

import collections
import contextlib
import functools
import json
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from functrain.checkpoint import _errors, _leaves, _storage
from functrain.checkpoint._checkpointer import find_checkpoints
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._manifest import STATE, parse_spec, read_manifest
from functrain.common import _patterns, _repr, _tree
from functrain.common._checks import require, require_instance, require_no_problems
from functrain.common._library import import_optional
from functrain.common._types import PyTree
from functrain.common._warnings import warn
from functrain.model._freeze import merged_paths
from functrain.step._state import TrainState

Rename = Callable[[str], str]


class ArrayFile(NamedTuple):
    """An open file of arrays.

    Attributes:
      specs: Dtype and shape of each array, such as ``float32[8, 3]``, by path.
      read: Given a path, returns the array; given also a box, that part of it.
    """

    specs: Mapping[str, str]
    read: Callable[..., np.ndarray]


class WarmStart(NamedTuple):
    """What `warm_start` returns: the state, and a report of its leaves.

    Its `repr` is a table of at most six lines.

    Attributes:
      state: The state with the leaves of the file.
      loaded: Paths in the state that were taken, each with the path in the file.
      unused: Paths in the file that were not taken.
      missing: Paths in the state that were asked for, but are not in the file: they are unchanged.
      unchanged: Paths in the state that were not asked for.
      source: The file or the checkpoint.

    Examples:
      >>> warm = WarmStart((), {"params/a/w": "a/w"}, ("b/w", "b/b"), (), ("step",), "old.h5")
      >>> print(warm)
      Warm start from old.h5
        loaded        1 leaf: params/a/w
        unused        2 of the file: b/w, b/b
        missing       0 of the state
        unchanged     1 of the state, not asked for: step
    """

    state: PyTree
    loaded: Mapping[str, str]
    unused: tuple[str, ...]
    missing: tuple[str, ...]
    unchanged: tuple[str, ...]
    source: str

    def __repr__(self) -> str:
        lines = [f"Warm start from {_repr.shorten_start(self.source, 64)}"]
        for name, paths, unit in (
            ("loaded", self.loaded, "leaf" if len(self.loaded) == 1 else "leaves"),
            ("unused", self.unused, "of the file"),
            ("missing", self.missing, "of the state"),
            (
                "unchanged",
                self.unchanged,
                "of the state" + ", not asked for" * bool(self.unchanged),
            ),
        ):
            lines.append(_summary_line(f"  {name:<10}{len(paths):>5,} {unit}", list(paths)))
        return "\n".join(lines)


def warm_start(
    state: PyTree,
    source: str | os.PathLike[str],
    *,
    take: str | Sequence[str] | None = None,
    skip: str | Sequence[str] = (),
    rename: Rename | None = None,
    cast: bool = False,
) -> WarmStart:
    """Replaces leaves of a state by those of a file; all others are unchanged.

    Leaves are matched by path. Patterns match paths of the state, as for files: `*` stands for one
    part of a path, `**` for any number of them: ``"params/encoder/**"``, ``"**/kernel"``. A leaf
    that the file does not have under its path is also looked for where it is with and without
    `freeze`: ``params/body/kernel`` fills ``model_state/frozen/body/kernel``, and vice versa.
    Patterns match both paths of such a leaf.

    Args:
      state: Any pytree of arrays. Leaves that are taken get the sharding of those they replace, and
        are strongly typed; the other leaves are the same arrays, not copies. Abstract leaves
        (`jax.ShapeDtypeStruct`) must all be taken.
      source: A checkpoint of `functrain.save`; the directory of a `Checkpointer`, whose last
        checkpoint that is not damaged is read (of a finished run, its result), or of one of its
        steps; a file `.safetensors`, `.weights.h5` (or another HDF5) or `.keras`. For the names
        that Keras gives to layers see `bridge.warm_start`.
      take: Patterns of the leaves to take. By default all; of each `TrainState` in the tree only
        params and model_state, so that training starts anew: at step 0, with the optimizer and the
        rng of `state`.
      skip: Patterns of leaves not to take even so, such as a head of another width.
      rename: Given a path in the file, returns the path in the state:
        ``rename=lambda path: f"params/{path}"``.
      cast: True converts floating-point leaves of another dtype. A number that the new dtype cannot
        hold is an error.

    Returns:
      WarmStart(state, loaded, unused, missing, unchanged, source).

    Raises:
      FileNotFoundError: Nothing is at `source`.
      CheckpointMismatchError: The file is of an unknown format, or has leaves of another shape or
        dtype, which are named. Nothing was taken. It is a ValueError.
      CheckpointCorruptError: The file is damaged.
      ValueError: A pattern matches nothing; two paths in the file become the same; an abstract leaf
        is not taken; `cast` would make numbers infinite.
      ImportError: A `.safetensors` file, and the library is not installed.

    Examples:
      >>> import functrain as ft, jax.numpy as jnp, optax, tempfile
      >>> def create(classes):
      ...     params = {"body": jnp.full(4, 1.0 * classes), "head": jnp.zeros((4, classes))}
      ...     return ft.TrainState.create(params=params, tx=optax.adam(1e-3))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     ft.save(f"{folder}/old", create(10))
      ...     warm = warm_start(create(2), f"{folder}/old", skip="params/head")
      >>> print(warm)
      Warm start from .../old
        loaded        1 leaf: params/body
        unused        ...
        missing       0 of the state
        unchanged     ...
    """
    leaves = _state_leaves(state)
    take_patterns = None if take is None else _as_patterns("take", take)
    skip_patterns = _as_patterns("skip", skip)
    requested = []
    merged = merged_paths(leaves)
    for path, is_taken in zip(leaves, _taken_by_default(state), strict=True):
        paths = {path, merged[path]}
        if take_patterns is not None:
            is_taken = any(_matches_any(pattern, paths) for pattern in take_patterns)
        if is_taken and not any(_matches_any(pattern, paths) for pattern in skip_patterns):
            requested.append(path)
    reasons: list[str] = []  # why checkpoints were passed over
    _, candidates = find_checkpoints(source, "a checkpoint, or a file of arrays")
    for file in reversed(candidates):
        try:
            with open_arrays(file) as arrays:
                names = _add_frozen(_map_paths(file, arrays.specs, rename), merged)
                known_paths = dict.fromkeys([*leaves, *merged.values()])
                _require_used_patterns(file, names, known_paths, take_patterns, skip_patterns)
                new_leaves, report = _take(file, arrays, leaves, names, requested, cast)
        except CheckpointCorruptError as error:
            # An older checkpoint may be intact. Other errors concern the arguments, and end this.
            reasons.append(str(error))
            continue
        for reason in reasons:
            warn(f"Passed over, for {file}: {reason}")
        values = {**leaves, **new_leaves}.values()
        return report._replace(state=jax.tree.unflatten(jax.tree.structure(state), values))
    raise CheckpointCorruptError("\n".join(reasons))


def _state_leaves(state: PyTree) -> dict[str, Any]:
    """Returns the leaves of a state by path; raises TypeError unless all are arrays."""
    # functrain.load takes its path first, so the two arguments are easily swapped.
    if isinstance(state, str | os.PathLike):
        raise TypeError("the order is functrain.warm_start(state, source), got a path first")
    leaves = {}
    for name, leaf in _leaves.named_leaves({STATE: state}).items():
        path = _leaves.leaf_path(name)
        if not _tree.is_array(leaf):
            is_model = hasattr(leaf, "stateless_call")  # a Keras model
            hint = " Its state is bridge.create_state(model, tx)." if is_model else ""
            raise TypeError(f"state: expected an array at {path}, got {_tree.spec(leaf)}.{hint}")
        leaves[path] = leaf
    return leaves


def _taken_by_default(state: PyTree) -> list[bool]:
    """Returns for each leaf whether a new training takes it: a TrainState's optimizer stays."""

    def mark(node: Any) -> Any:
        if not isinstance(node, TrainState):
            return True
        fields = {"params": node.params, "model_state": node.model_state}
        is_taken = jax.tree.map(lambda _: True, fields)
        return jax.tree.map(lambda _: False, node).replace(**is_taken)

    return jax.tree.leaves(jax.tree.map(mark, state, is_leaf=lambda x: isinstance(x, TrainState)))


def _summary_line(head: str, paths: Sequence[str]) -> str:
    """Returns a line that names paths, grouped by the deepest folders that fit into 80 columns."""
    line, deepest = head, max((path.count("/") + 1 for path in paths), default=0)
    for depth in range(deepest, 0, -1):
        folders = collections.Counter("/".join(path.split("/")[:depth]) for path in paths)
        names = [name if name in paths else f"{name} ({n:,})" for name, n in folders.items()]
        line = f"{head}: {', '.join(names)}"
        if len(line) <= 80:
            return line
    return line if len(line) <= 80 else f"{line[:77]}..."


def _as_patterns(name: str, value: str | Sequence[str]) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(value)
    for pattern in patterns:
        require_instance(name, pattern, str, "patterns, such as 'params/**'")
    return patterns


def _map_paths(source: str, file_paths: Collection[str], rename: Rename | None) -> dict[str, str]:
    """Returns the paths in a file by their paths in the state."""
    names: dict[str, str] = {}
    for file_path in file_paths:
        path = file_path if rename is None else rename(file_path)
        call = f"rename({file_path!r})"
        advice = "Return the path itself for leaves that are not to be taken."
        require_instance(call, path, str, "a path", advice)
        advice = f"{source} has {names.get(path)!r}, which is renamed to it, too."
        require(path not in names, call, "a path that no other leaf is renamed to", path, advice)
        names[path] = file_path
    return names


def _add_frozen(names: Mapping[str, str], merged: Mapping[str, str]) -> dict[str, str]:
    """Adds leaves whose paths differ only because a model is frozen, in the file or the state.

    Args:
      names: Paths in the file by path in the state.
      merged: The `merged_paths` of the state.
    """
    merged_names = {path: names[name] for name, path in merged_paths(names).items()}
    frozen_names = {p: merged_names[path] for p, path in merged.items() if path in merged_names}
    return {**frozen_names, **merged_names, **names}


def _require_used_patterns(
    source: str,
    names: Mapping[str, str],
    leaves: Collection[str],
    take: Sequence[str] | None,
    skip: Sequence[str],
) -> None:
    """Raises ValueError for patterns without a match, which are most likely mistyped."""
    # A leaf may be skipped that only one side has, but to be taken it has to be in both.
    checks = [("skip", pattern, {*names, *leaves}) for pattern in skip]
    checks += [("take", pattern, {*names} & {*leaves}) for pattern in take or ()]
    for name, pattern, paths in checks:
        if _matches_any(pattern, paths):
            continue
        is_in_state = _matches_any(pattern, leaves)
        place, candidates = (source, names) if is_in_state else ("the state", leaves)
        close = " or ".join(map(repr, _patterns.closest_patterns(pattern, list(candidates))))
        raise ValueError(
            f"{name}: expected a pattern of paths in {place}, got {pattern!r}, which matches "
            f"none. {f'Nearest: {close}.' if close else 'There are no paths at all.'}"
        )


def _matches_any(pattern: str, paths: Collection[str]) -> bool:
    return any(_patterns.matches(pattern, path) for path in paths)


def _require_same_specs(
    source: str, specs: Mapping[str, str], leaves: Mapping[str, Any], cast: bool
) -> None:
    """Raises CheckpointMismatchError for another shape or dtype. No array is read."""
    lines, wrong_paths, all_castable = [], [], True
    for path, spec in specs.items():
        state_spec = _tree.strong_spec(leaves[path])
        shape = _float_shape(spec)
        is_castable = shape is not None and shape == _float_shape(state_spec)
        if spec != state_spec and not (cast and is_castable):
            wrong_paths.append(path)
            lines.append(f"{path}: the file has {spec}, the state {state_spec}")
            all_castable = all_castable and is_castable
    if lines:
        raise CheckpointMismatchError(
            f"{source}: expected the shapes and dtypes of the state, got others:\n"
            f"{_tree.bullets(lines)}\nNothing was taken. "
            f"{'To convert: cast=True. ' if all_castable else ''}"
            f"To leave them unchanged: skip={wrong_paths[0]!r}, or a pattern."
        )


def _float_shape(spec: str) -> tuple[int, ...] | None:
    """Returns the shape of a spec of floating-point numbers, None for any other dtype."""
    try:
        dtype, shape = parse_spec(spec)
    except (TypeError, ValueError):  # a key, or a dtype that JAX does not know
        return None
    return shape if jnp.issubdtype(dtype, jnp.floating) else None


def _take(
    source: str,
    arrays: ArrayFile,
    leaves: Mapping[str, Any],
    names: Mapping[str, str],
    requested: Collection[str],
    cast: bool,
) -> tuple[dict[str, Any], WarmStart]:
    """Reads leaves from a file. Returns them by path, and the report without a state.

    Args:
      source: The file.
      arrays: Its arrays.
      leaves: Leaves of the state by path.
      names: Paths in the file by path in the state.
      requested: Paths in the state that are asked for.
      cast: As for `warm_start`.
    """
    file_paths = {path: names[path] for path in requested if path in names}
    if not file_paths:
        # Files of Keras have other paths than a state. bridge.warm_start translates them.
        from_keras = ", or use bridge.warm_start(state, file, model) for a file of Keras"
        raise (ValueError if arrays.specs else CheckpointMismatchError)(
            f"{source}: expected leaves to take, got none that is asked for. It has, for one, "
            f"{next(iter(names), 'nothing')}; the state has "
            f"{next(iter(requested), 'nothing that is asked for')}. Pass as rename= a function "
            "from paths in the file to paths in the state"
            f"{from_keras if source.endswith(('.keras', '.h5')) else ''}."
        )
    specs = {path: arrays.specs[name] for path, name in file_paths.items()}
    _require_same_specs(source, specs, leaves, cast)
    require_no_problems(
        "state",
        [path for path, x in leaves.items() if path not in file_paths and _has_no_values(x)],
        "arrays with values, neither abstract nor donated to a program, wherever none is taken",
        "Nothing was taken. Create the state with values, or use the one that the program "
        "returned.",
    )
    new_leaves = {}
    for path, name in file_paths.items():
        # One by one, so that the buffers of the file exist for one leaf at a time.
        read = functools.partial(_read_as, arrays, name, path, leaves[path])
        new_leaves[path] = _leaves.restore_leaf(path, leaves[path], read)
    return new_leaves, WarmStart(
        state=None,
        loaded=file_paths,
        unused=_without(arrays.specs, file_paths.values()),
        missing=_without(requested, names),
        unchanged=_without(leaves, requested),
        source=source,
    )


def _without(paths: Collection[str], removed: Collection[str]) -> tuple[str, ...]:
    removed = set(removed)
    return tuple(path for path in paths if path not in removed)


def _has_no_values(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct) or _tree.is_deleted(leaf)


def _read_as(
    arrays: ArrayFile, name: str, path: str, like: Any, box: _leaves.Box | None = None
) -> np.ndarray:
    """Returns an array, or the part of it in a box, in the dtype of a leaf."""
    data = arrays.read(name, box)
    if _tree.is_key(like) or data.dtype == like.dtype:
        return data
    # An overflow is reported below, as an error instead of NumPy's warning.
    with np.errstate(over="ignore"):
        converted: np.ndarray = data.astype(like.dtype)
    if not np.array_equal(np.isfinite(data), np.isfinite(converted)):
        raise ValueError(
            f"cast: expected numbers that {like.dtype} can hold, got larger ones in {path}, "
            f"{data.dtype} in the file. Nothing was taken. Use a wider dtype in the state."
        )
    return converted


# Readers of the file formats.


def open_arrays(path: str) -> contextlib.AbstractContextManager[ArrayFile]:
    """Opens a checkpoint, or a file of a format that its suffix tells."""
    if os.path.isdir(path):
        return _open_checkpoint(path)
    readers = {".safetensors": _open_safetensors, ".keras": _open_keras}
    readers |= {".h5": _open_hdf5, ".hdf5": _open_hdf5}
    suffix = os.path.splitext(path)[1].lower()
    _errors.raise_mismatch_unless(
        suffix in readers,
        f"{path}: expected a checkpoint's directory, or a file named {', '.join(readers)}, got "
        f"{f'one named {suffix}' if suffix else 'a file without a suffix'}. Convert it.",
    )
    with open(path, "rb") as file:
        first_bytes = file.read(2)
    # A pickle starts with the opcode PROTO and a version up to 5.
    is_pickle = first_bytes[:1] == b"\x80" and first_bytes[1:] <= b"\x05"
    is_zip = first_bytes == b"PK" and suffix != ".keras"
    _errors.raise_mismatch_unless(
        not is_pickle and not is_zip,
        f"{path}: expected a file of the format in its name, got "
        f"{'a pickle' if is_pickle else 'a zip archive, as torch.save writes it'}. Nothing is "
        "unpickled here: that can run code. If you trust the file, load it with the program that "
        "wrote it, and save its arrays with safetensors.",
    )
    return readers[suffix](path)


@contextlib.contextmanager
def _open_checkpoint(directory: str) -> Iterator[ArrayFile]:
    """Opens the state in a checkpoint; of a finished run, the state that it returned."""
    manifest = read_manifest(directory)
    tree = "final" if "final" in manifest["trees"] else STATE
    names, specs = dict[str, str](), dict[str, str]()
    for name, record in manifest["leaves"].items():
        if _leaves.tree_name(name) == tree:
            path = _leaves.leaf_path(name)
            names[path], specs[path] = name, record["spec"]

    def read(path: str, box: _leaves.Box | None = None) -> np.ndarray:
        name = names[path]
        readers = {name: lambda read_leaf: read_leaf(box)}
        array: np.ndarray = _storage.read_leaves(directory, manifest, readers)[name]
        return array

    yield ArrayFile(specs, read)


def import_safetensors() -> Any:
    """Returns the library; the ImportError tells how to install it."""
    to_install = "safetensors files need the library: pip install 'functrain[safetensors]'"
    import_optional("safetensors.numpy", to_install)
    return import_optional("safetensors", to_install)


def _library_errors(path: str, *errors: type[Exception]) -> contextlib.AbstractContextManager[None]:
    """Context manager that turns a library's errors into a CheckpointCorruptError."""
    return _errors.corrupt_on(
        *errors,
        expected=f"{path}: expected an intact {os.path.splitext(path)[1]} file",
        advice="It is damaged, cut short, or not of the format in its name.",
    )


@contextlib.contextmanager
def _open_safetensors(path: str) -> Iterator[ArrayFile]:
    library = import_safetensors()
    # Opening it checks the header, its offsets, and the length of the file.
    with _library_errors(path, library.SafetensorError), library.safe_open(path, "numpy"):
        pass
    # The arrays are read here, because the library returns NumPy's own dtypes and bfloat16, but
    # not float8.
    with open(path, "rb") as file:
        header_length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_length))
    header.pop("__metadata__", None)

    def read(name: str, box: _leaves.Box | None = None) -> np.ndarray:
        dtype = jnp.dtype(_storage.DTYPES[header[name]["dtype"]])
        begin, end = header[name]["data_offsets"]
        offset = 8 + header_length + begin
        data = np.fromfile(path, np.uint8, end - begin, offset=offset)
        array: np.ndarray = data.view(dtype).reshape(header[name]["shape"])
        return array if box is None else array[box]

    specs = {}
    for name, record in header.items():
        dtype = _storage.DTYPES.get(record["dtype"], record["dtype"])
        specs[name] = _tree.format_spec(dtype, record["shape"])
    yield ArrayFile(specs, read)


@contextlib.contextmanager
def _open_hdf5(path: str, file: IO[bytes] | None = None) -> Iterator[ArrayFile]:
    """Opens an HDF5 file, or one within an archive. Links to other files are not followed."""
    import h5py

    datasets: dict[str, Any] = {}

    def add_dataset(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset):
            datasets[name] = node

    def read(name: str, box: _leaves.Box | None = None) -> np.ndarray:
        with _library_errors(path, OSError):
            raw = datasets[name][() if box is None else box]
        return np.asarray(raw).view(_hdf5_dtype(datasets[name]))

    with contextlib.ExitStack() as stack:
        with _library_errors(path, OSError, RuntimeError):
            stack.enter_context(h5py.File(file or path, "r")).visititems(add_dataset)
        specs = {}
        for name, dataset in datasets.items():
            _errors.raise_mismatch_unless(
                not dataset.external and not dataset.is_virtual,
                f"{path}: expected arrays within the file, got {name}, whose values are in "
                "another file. Such files are not read. Copy the values into one file.",
            )
            specs[name] = _tree.format_spec(_hdf5_dtype(dataset), dataset.shape or ())
        yield ArrayFile(specs, read)


def _hdf5_dtype(dataset: Any) -> np.dtype:
    """Returns the dtype of a dataset. HDF5 has no bfloat16: Keras marks it by an attribute."""
    is_bfloat16 = dataset.attrs.get("dtype") == "bfloat16" and dataset.dtype.itemsize == 2
    return jnp.dtype("bfloat16") if is_bfloat16 else dataset.dtype


@contextlib.contextmanager
def _open_keras(path: str) -> Iterator[ArrayFile]:
    """Opens the weights in a Keras archive, which has checksums. Its config is not read."""
    member = "model.weights.h5"
    zip_errors = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError)
    with tempfile.TemporaryFile() as weights:
        with _library_errors(path, *zip_errors), zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            _errors.raise_mismatch_unless(
                member in names,
                f"{path}: expected an archive with {member}, as Keras 3 saves it, got one with "
                f"{names[:5]}. Save the model with Keras 3.",
            )
            info = archive.getinfo(member)
            # A few kilobytes can expand to gigabytes. Weights hardly compress.
            _errors.raise_mismatch_unless(
                info.file_size <= max(2**28, 100 * info.compress_size),
                f"{path}: expected {member} as Keras stores it, got {info.compress_size} bytes "
                f"that stand for {info.file_size}. Such files are not read.",
            )
            with archive.open(member) as file:
                shutil.copyfileobj(file, weights)
        weights.seek(0)
        with _open_hdf5(path, weights) as arrays:
            yield arrays
