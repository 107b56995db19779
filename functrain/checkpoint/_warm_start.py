"""A part of a state out of a file: warm starts, transfer learning, changed heads.

No file is trusted: nothing is unpickled, no code is run, and no memory is taken for an array before
its shape and dtype are those that are wanted.
"""

import collections
import contextlib
import functools
import json
import os
import shutil
import tempfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from functrain.checkpoint import _leaves, _storage
from functrain.checkpoint._checkpointer import Checkpointer
from functrain.checkpoint._errors import CheckpointCorruptError, CheckpointMismatchError
from functrain.checkpoint._manifest import STATE, parse_spec, read_manifest
from functrain.common import _patterns, _repr, _tree
from functrain.common._library import import_optional
from functrain.common._types import PyTree
from functrain.step._state import TrainState

Rename = Callable[[str], str]


class Arrays(NamedTuple):
    """The arrays of a file that is open.

    Attributes:
      specs: Dtype and shape of each, such as ``float32[8, 3]``, by path.
      read: Given a path, returns its array; given a box, too, this part of it.
    """

    specs: Mapping[str, str]
    read: Callable[..., np.ndarray]


class WarmStart(NamedTuple):
    """What `warm_start` returns: the state, and what it is made of, leaf by leaf.

    Its `repr` is a table of at most six lines.

    Attributes:
      state: With what was taken, in its place.
      taken: Paths in the state, each with that in the file.
      left: Paths in the file that were not taken.
      missing: Paths in the state that were asked for, and are not in the file: they stay.
      kept: Paths in the state that were not asked for: they stay.
      source: The file or the checkpoint.

    Examples:
      >>> warm = WarmStart((), {"params/a/w": "a/w"}, ("b/w", "b/b"), (), ("step",), "old.h5")
      >>> print(warm)
      Warm start from old.h5
        taken       1 leaf: params/a/w
        left        2 of the file: b/w, b/b
        missing     0 of the state
        kept        1 of the state, not asked for: step
    """

    state: PyTree
    taken: Mapping[str, str]
    left: tuple[str, ...]
    missing: tuple[str, ...]
    kept: tuple[str, ...]
    source: str

    def __repr__(self) -> str:
        rows = [
            ("taken", self.taken, "leaf" if len(self.taken) == 1 else "leaves"),
            ("left", self.left, "of the file"),
            ("missing", self.missing, "of the state"),
            ("kept", self.kept, "of the state" + ", not asked for" * bool(self.kept)),
        ]
        lines = [_row(f"  {name:<8}{len(x):>5,} {what}", list(x)) for name, x, what in rows]
        return "\n".join([f"Warm start from {_repr.shorten_start(self.source, 64)}", *lines])


def warm_start(
    state: PyTree,
    source: str | os.PathLike[str],
    *,
    take: str | Sequence[str] | None = None,
    skip: str | Sequence[str] = (),
    rename: Rename | None = None,
    cast: bool = False,
) -> WarmStart:
    """Takes leaves of a state out of a file; all others stay as they are.

    Leaves are matched by path. A pattern means paths of the state, as for files: `*` stands for
    one part of a path, `**` for any number: ``"params/encoder/**"``, ``"**/kernel"``.

    Args:
      state: Any pytree of arrays. Leaves that are taken get the sharding of those they replace, and
        are strongly typed; leaves that stay are the same arrays, not copies. Abstract leaves
        (`jax.ShapeDtypeStruct`) have to be taken, all of them.
      source: What `functrain.save` wrote; the directory of a `Checkpointer`, whose last checkpoint
        that is not damaged is read (of a finished run, its result), or of one of its steps; a
        file `.safetensors`, `.weights.h5` (or another HDF5) or `.keras`. For names of Keras see
        `bridge.warm_start`.
      take: Patterns of what to take. By default all; of a `TrainState` params and model_state, so
        that training begins anew: at step 0, with the optimizer and the rng of `state`.
      skip: Patterns of what to leave as it is all the same, such as a head of another width.
      rename: Given a path in the file, returns the path in the state:
        ``rename=lambda path: f"params/{path}"``.
      cast: Convert floating-point leaves of another dtype. A number that the new dtype cannot hold
        is an error.

    Returns:
      WarmStart(state, taken, left, missing, kept, source).

    Raises:
      FileNotFoundError: Nothing is at `source`.
      CheckpointMismatchError: It holds no arrays of a kind that is known; or leaves of another
        shape or dtype, which are named. Nothing was taken. It is a ValueError.
      CheckpointCorruptError: It is damaged.
      ValueError: A pattern means nothing; two paths in the file become one; an abstract leaf is
        not taken; `cast` would make numbers infinite.
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
        taken       1 leaf: params/body
        left        ...
        missing     0 of the state
        kept        ...
    """
    if isinstance(state, str | os.PathLike):
        raise TypeError("the order is functrain.warm_start(state, source), got a path first")
    leaves = {_leaves.leaf_path(n): x for n, x in _leaves.named_leaves({STATE: state}).items()}
    for path, leaf in leaves.items():
        if not _tree.is_array(leaf):
            is_model = hasattr(leaf, "stateless_call")
            hint = " Its state is bridge.create_state(model, tx)." if is_model else ""
            raise TypeError(f"state: expected an array at {path}, got {_tree.spec(leaf)}.{hint}")
    default = ("params/**", "model_state/**") if isinstance(state, TrainState) else ("**",)
    taking, skipping = None if take is None else _listed("take", take), _listed("skip", skip)
    wanted = [
        path
        for path in leaves
        if _patterns.any_matches(taking or default, path)
        and not _patterns.any_matches(skipping, path)
    ]
    reasons: list[str] = []
    for name in _candidates(os.path.realpath(source)):
        try:
            with opened(name) as arrays:
                names = _renamed(name, arrays.specs, rename)
                _require_used(name, names, leaves, taking, skipping)
                found, warm = _taken(name, arrays, leaves, names, wanted, cast)
        except CheckpointCorruptError as error:
            reasons.append(str(error))
            continue
        for reason in reasons:
            warnings.warn(f"Passed over, for {name}: {reason}", stacklevel=2)
        values = [found.get(path, leaf) for path, leaf in leaves.items()]
        return warm._replace(state=jax.tree.unflatten(jax.tree.structure(state), values))
    raise CheckpointCorruptError("\n".join(reasons))


def _row(head: str, paths: Sequence[str]) -> str:
    """Returns a line about paths, by their folders: the deepest for which there is room."""
    line, deepest = head, max((path.count("/") + 1 for path in paths), default=0)
    for depth in range(deepest, 0, -1):
        folders = collections.Counter("/".join(path.split("/")[:depth]) for path in paths)
        names = [name if name in paths else f"{name} ({n:,})" for name, n in folders.items()]
        line = f"{head}: {', '.join(names)}"
        if len(line) <= 80:
            break
    return line if len(line) <= 80 else f"{line[:77]}..."


def _listed(name: str, patterns: str | Sequence[str]) -> tuple[str, ...]:
    listed = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not all(isinstance(pattern, str) for pattern in listed):
        raise TypeError(f"{name}: expected patterns, such as 'params/**', got {patterns!r}")
    return listed


def _renamed(source: str, names: Collection[str], rename: Rename | None) -> dict[str, str]:
    """Returns paths in a file by path in the state."""
    renamed: dict[str, str] = {}
    for name in names:
        path = name if rename is None else rename(name)
        if not isinstance(path, str):
            raise TypeError(
                f"rename: expected a function of paths to paths, got {type(path).__name__} for "
                f"{name!r}. What is not to be taken may keep its name."
            )
        if path in renamed:
            raise ValueError(
                f"rename: expected another path for each in {source}, got {path!r} for "
                f"{renamed[path]!r} and for {name!r}."
            )
        renamed[path] = name
    return renamed


def _require_used(
    source: str,
    names: Mapping[str, str],
    leaves: Collection[str],
    take: Sequence[str] | None,
    skip: Sequence[str],
) -> None:
    """Raises ValueError for patterns without a match: they are most likely mistyped."""
    both = [path for path in leaves if path in names]
    checks = [("skip", pattern, [*names, *leaves]) for pattern in skip]
    checks += [("take", pattern, both) for pattern in take or ()]
    for name, pattern, paths in checks:
        if not any(_patterns.matches(pattern, path) for path in paths):
            in_state = any(_patterns.matches(pattern, path) for path in leaves)
            where, there = (source, list(names)) if in_state else ("the state", list(leaves))
            close = " or ".join(map(repr, _patterns.closest_patterns(pattern, there)))
            raise ValueError(
                f"{name}: expected a pattern of paths in {where}, got {pattern!r}, which means "
                f"none. " + (f"Nearest: {close}." if close else "There are no paths at all.")
            )


def _require_specs(
    source: str, specs: Mapping[str, str], leaves: Mapping[str, Any], cast: bool
) -> None:
    """Raises CheckpointMismatchError for another shape or dtype, before anything is read."""
    wrong, castable = {}, True
    for path, spec in specs.items():
        wanted = _tree.strong_spec(leaves[path])
        shape = _shape_of_floats(spec)
        is_castable = shape is not None and shape == _shape_of_floats(wanted)
        if spec != wanted and not (cast and is_castable):
            wrong[path] = f"{path}: the file has {spec}, the state {wanted}"
            castable = castable and is_castable
    if wrong:
        raise CheckpointMismatchError(
            f"{source}: expected the shapes and dtypes of the state, got others:\n"
            f"{_tree.bullets(list(wrong.values()))}\nNothing was taken. "
            + ("To convert: cast=True. " if castable else "")
            + f"To leave them as they are: skip={next(iter(wrong))!r}, or a pattern."
        )


def _shape_of_floats(spec: str) -> tuple[int, ...] | None:
    """Returns the shape of floating-point numbers, None of other leaves."""
    try:
        dtype, shape = parse_spec(spec)
    except (TypeError, ValueError):  # of a key, or a dtype that nobody here knows
        return None
    return shape if jnp.issubdtype(dtype, jnp.floating) else None


def _taken(
    source: str,
    arrays: Arrays,
    leaves: Mapping[str, Any],
    names: Mapping[str, str],
    wanted: Collection[str],
    cast: bool,
) -> tuple[dict[str, Any], WarmStart]:
    """Returns the leaves that are taken out of a file, by path, and the report."""
    taken = {path: names[path] for path in wanted if path in names}
    if not taken:
        of_keras = ", or take bridge.warm_start(state, file, model) for a file of Keras"
        raise (ValueError if arrays.specs else CheckpointMismatchError)(
            f"{source}: expected leaves to take, got none that is asked for. It has, for one, "
            f"{next(iter(names), 'nothing')}; the state has "
            f"{next(iter(wanted), 'nothing that is asked for')}. Give rename= a function "
            "from paths in the file to paths in the state"
            f"{of_keras * source.endswith(('.keras', '.h5'))}."
        )
    _require_specs(source, {path: arrays.specs[n] for path, n in taken.items()}, leaves, cast)
    empty = [
        path
        for path, leaf in leaves.items()
        if path not in taken and (isinstance(leaf, jax.ShapeDtypeStruct) or _tree.is_deleted(leaf))
    ]
    if empty:
        raise ValueError(
            "state: expected arrays where nothing is taken, got shapes without values, or arrays "
            f"that were donated to a program:\n{_tree.bullets(empty)}\nNothing was taken. Make "
            "the state with values, or take the one that the program returned."
        )
    found = {}
    for path, name in taken.items():  # one by one, so that not all of them are there twice
        read = functools.partial(_read, arrays, name, path, leaves[path])
        found[path] = _leaves.restore_leaf(path, leaves[path], read)
    return found, WarmStart(
        state=None,
        taken=taken,
        left=tuple(name for name in arrays.specs if name not in set(taken.values())),
        missing=tuple(path for path in wanted if path not in names),
        kept=tuple(path for path in leaves if path not in set(wanted)),
        source=source,
    )


def _read(
    arrays: Arrays, name: str, path: str, like: Any, box: _leaves.Box | None = None
) -> np.ndarray:
    """Returns a part of an array in the dtype of a leaf, or all of it."""
    data = arrays.read(name, box)
    if _tree.is_key(like) or data.dtype == like.dtype:
        return data
    with np.errstate(over="ignore"):
        new: np.ndarray = data.astype(like.dtype)
    if not np.array_equal(np.isfinite(data), np.isfinite(new)):
        raise ValueError(
            f"cast: expected numbers that {like.dtype} can hold, got larger ones in {path}, "
            f"{data.dtype} in the file. Nothing was taken."
        )
    return new


# Where arrays come from.


def _candidates(path: str) -> Iterator[str]:
    """Yields what may be read: one file or checkpoint, or steps, the last first."""
    place = _storage.find_checkpoint(path, "a checkpoint, or a file of arrays")
    steps = Checkpointer(place).steps() if os.path.isdir(place) else []
    for step in reversed(steps):
        yield _storage.find_checkpoint(os.path.join(place, f"{step:012d}"))
    if not steps:
        yield place


def opened(path: str) -> contextlib.AbstractContextManager[Arrays]:
    """Opens a checkpoint, or a file by its suffix."""
    if os.path.isdir(path):
        return _checkpoint(path)
    kinds = {".safetensors": _safetensors, ".keras": _keras, ".h5": _hdf5, ".hdf5": _hdf5}
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in kinds:
        raise CheckpointMismatchError(
            f"{path}: expected a checkpoint's directory, or a file named {', '.join(kinds)}, got "
            f"{f'one named {suffix}' if suffix else 'a file without a suffix'}."
        )
    with open(path, "rb") as file:
        first = file.read(2)
    is_pickle = first[:1] == b"\x80" and first[1:] <= b"\x05"
    if is_pickle or (first == b"PK" and suffix != ".keras"):
        kind = "a pickle" if is_pickle else "a zip archive, as torch.save writes it"
        raise CheckpointMismatchError(
            f"{path}: expected what its name says, got {kind}. Nothing is unpickled here: that can "
            "run code. Where you trust it, load it with what wrote it, and save its arrays with "
            "safetensors."
        )
    return kinds[suffix](path)


@contextlib.contextmanager
def _checkpoint(directory: str) -> Iterator[Arrays]:
    """Opens the state in a checkpoint; of a run that is over, what it returned."""
    manifest = read_manifest(directory)
    root = "final" if "final" in manifest["trees"] else STATE
    names = {_leaves.leaf_path(n): n for n in manifest["leaves"] if _leaves.tree_name(n) == root}

    def read(path: str, box: _leaves.Box | None = None) -> np.ndarray:
        uses = {names[path]: lambda read: read(box)}
        array: np.ndarray = _storage.read_leaves(directory, manifest, uses)[names[path]]
        return array

    yield Arrays({path: manifest["leaves"][n]["spec"] for path, n in names.items()}, read)


def import_safetensors() -> Any:
    """Returns the library, or says how to install it."""
    to_install = "safetensors files need the library: pip install 'functrain[safetensors]'"
    import_optional("safetensors.numpy", to_install)
    return import_optional("safetensors", to_install)


@contextlib.contextmanager
def _understood(path: str, *errors: type[Exception]) -> Iterator[None]:
    """Makes a CheckpointCorruptError of what a library raises of a file that is damaged."""
    try:
        yield
    except errors as error:
        raise CheckpointCorruptError(
            f"{path}: expected a whole {os.path.splitext(path)[1]} file, got one that cannot be "
            f"read: {error}. It is damaged, cut short, or of another kind than its name says."
        ) from error


@contextlib.contextmanager
def _safetensors(path: str) -> Iterator[Arrays]:
    library = import_safetensors()
    with _understood(path, library.SafetensorError), library.safe_open(path, framework="numpy"):
        pass  # it compares the header with the length of the file, and its offsets
    # The library itself gives arrays of NumPy's own dtypes and bfloat16 only, not of fp8.
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)

        def read(name: str, box: _leaves.Box | None = None) -> np.ndarray:
            record = header[name]
            dtype = jnp.dtype(_storage.DTYPES[record["dtype"]])
            begin, end = record["data_offsets"]
            data = np.fromfile(path, np.uint8, end - begin, offset=8 + length + begin)
            array: np.ndarray = data.view(dtype).reshape(record["shape"])
            return array if box is None else array[box]

        yield Arrays(
            {
                name: _spec(_storage.DTYPES.get(x["dtype"], x["dtype"]), x["shape"])
                for name, x in header.items()
            },
            read,
        )


@contextlib.contextmanager
def _hdf5(path: str, file: IO[bytes] | None = None) -> Iterator[Arrays]:
    """Opens an HDF5 file, or such a file within another; links out of it are not followed."""
    import h5py

    datasets: dict[str, Any] = {}

    def note(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset):
            datasets[name] = node

    def read(name: str, box: _leaves.Box | None = None) -> np.ndarray:
        with _understood(path, OSError):
            raw = datasets[name][() if box is None else box]
        return np.asarray(raw).view(_hdf5_dtype(datasets[name]))

    with contextlib.ExitStack() as stack:
        with _understood(path, OSError, RuntimeError):
            stack.enter_context(h5py.File(file or path, "r")).visititems(note)
        if outside := [name for name, x in datasets.items() if x.external or x.is_virtual]:
            raise CheckpointMismatchError(
                f"{path}: expected arrays within the file, got {outside[0]}, whose values are in "
                "another file. Such files are not read."
            )
        specs = {name: _spec(_hdf5_dtype(x), x.shape or ()) for name, x in datasets.items()}
        yield Arrays(specs, read)


def _hdf5_dtype(dataset: Any) -> np.dtype:
    """Returns the dtype that is meant: HDF5 has no bfloat16, and Keras says so beside it."""
    is_bfloat16 = dataset.attrs.get("dtype") == "bfloat16" and dataset.dtype.itemsize == 2
    return jnp.dtype("bfloat16") if is_bfloat16 else dataset.dtype


def _spec(dtype: Any, shape: Any) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


@contextlib.contextmanager
def _keras(path: str) -> Iterator[Arrays]:
    """Opens the weights in a Keras archive, of which it has digests; its config is not read."""
    name, errors = "model.weights.h5", (zipfile.BadZipFile, zlib.error, EOFError)
    with tempfile.TemporaryFile() as weights:
        with _understood(path, *errors, NotImplementedError), zipfile.ZipFile(path) as archive:
            if name not in archive.namelist():
                raise CheckpointMismatchError(
                    f"{path}: expected an archive with {name}, as Keras 3 saves it, got one with "
                    f"{archive.namelist()[:5]}."
                )
            info = archive.getinfo(name)
            if info.file_size > max(2**28, 100 * info.compress_size):
                raise CheckpointMismatchError(
                    f"{path}: expected {name} as Keras stores it, got {info.compress_size} bytes "
                    f"that stand for {info.file_size}. Such files are not read."
                )
            with archive.open(name) as file:
                shutil.copyfileobj(file, weights)
        weights.seek(0)
        with _hdf5(path, weights) as arrays:
            yield arrays
