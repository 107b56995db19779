"""The results of `benchmarks.targets` as lines, tables and a page."""

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks import large_transformers

# The steps in a program.
K = 32

# What was found of one way, workload and target, as in the rows of targets.json.
Row = dict[str, Any]


def describe(row: Row) -> str:
    """Returns a line about a row, to print it as it comes."""
    if "error" in row:
        return f"{row['name']}, {row['target']}: {row['error']}"
    way = row.get("way") or f"{row['members']} members"
    what = f"{row['name']}, {row['target']}, {way}"
    if "fits" in row:
        verdict = "fits" if row["fits"] else "does not fit"
        size, room = gib(row["total"]), gib(row["memory"])
        return f"{what}: {size} of {room} GiB, {verdict} ({row['seconds']:.0f} s)"
    cycles = f"{row['cycles']:,} cycles, " if row["cycles"] else ""
    size = f"{row['temporaries'] / 2**20:.2f} MiB of temporaries"
    return f"{what}: {cycles}{row['kernels']:.1f} kernels, {size}"


def markdown(results: dict[str, Any]) -> str:
    """Returns the results as a page of tables."""
    of_versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    parts = [
        "# Training steps, compiled for TPUs and GPUs",
        f"These are estimates of the compilers; nothing was measured. {results['date']}, "
        f"{of_versions}. `python -m benchmarks.targets` writes this page.",
    ]
    # Written by hand if the rows are not those of a single run.
    if "note" in results:
        parts.append(results["note"])
    rows = [row for row in results["rows"] if "error" not in row]
    for target in dict.fromkeys(row["target"] for row in rows):
        here = [row for row in rows if row["target"] == target]
        parts += [*step_tables(here), *population_tables(here)]
    return "\n\n".join([*parts, *memory_table(rows)]) + "\n"


def step_tables(rows: list[Row]) -> list[str]:
    """Returns tables of one target: workloads by ways."""
    rows = [row for row in rows if row["part"] == "step"]
    if not rows:
        return []
    parts = [
        f"## A training step on {rows[0]['target']}",
        "Per step; a kernel within a loop counts as often as the loop runs. *one step* is the step "
        f"under `jax.jit`, *fused {K}* is functrain's program of {K} steps, *scan by hand* a "
        "`lax.scan` of the same step, and *Keras's train_step* a `lax.scan` of the step that Keras "
        "makes of the compiled model. The temporaries are those of the whole program.",
    ]
    if any(row["cycles"] for row in rows):
        parts += ["Cycles:", pivot(rows, "way", lambda row: f"{row['cycles']:,}")]
    parts += ["Kernels:", pivot(rows, "way", lambda row: f"{row['kernels']:.1f}")]
    temporaries = pivot(rows, "way", lambda row: f"{row['temporaries'] / 2**20:.2f}")
    return [*parts, "Temporaries (MiB):", temporaries]


def population_tables(rows: list[Row]) -> list[str]:
    """Returns tables of one target: workloads by the number of members."""
    rows = [row for row in rows if row["part"] == "population"]
    if not rows:
        return []
    single = {row["name"]: row["cycles"] for row in rows if row["members"] == 1}

    def cycles(row: Row) -> str:
        return f"{row['cycles']:,} ({row['cycles'] / single[row['name']]:.1f}×)"

    parts = [
        f"## Populations on {rows[0]['target']}",
        f"A step of all members, in a program of {K} steps, by the number of members.",
    ]
    if all(single.values()):
        parts += ["Cycles, and how many times those of one member:", pivot(rows, "members", cycles)]
    return [*parts, "Kernels:", pivot(rows, "members", lambda row: f"{row['kernels']:.1f}")]


def memory_table(rows: list[Row]) -> list[str]:
    """Returns the table of the large transformers."""
    rows = [row for row in rows if row["part"] == "memory"]
    if not rows:
        return []
    header = ["model", "target", "sharding", "state", "temporaries", "total", "of", "fits"]
    lines = [
        [
            *(row["name"], row["target"], row["way"]),
            *(gib(row[name]) for name in ("state", "temporaries", "total", "memory")),
            "yes" if row["fits"] else "**no**",
            collectives(row),
        ]
        for row in rows
    ]
    return [
        "## Large transformers",
        "GiB on each chip, from `functrain.inspect.memory`. If one buffer is larger than the "
        "memory, the compiler refuses the program before it adds up the others: the temporaries "
        "are then at least those given. The models are those of "
        "`benchmarks/large_transformers.py`: decoders with Adam and float32 parameters, whose "
        "layers are computed in bfloat16 and recomputed in the backward pass, and one sequence of "
        f"{large_transformers.TOKENS:,} tokens a chip.",
        table([*header, "a step sends (GiB a chip)"], lines),
    ]


def collectives(row: Row) -> str:
    """Returns the collectives of a step: calls, kind, GiB."""
    sent = row.get("collectives", {}).items()
    return ", ".join(f"{calls} {kind} ({gib(size, 1)})" for kind, (calls, size) in sent)


def pivot(rows: list[Row], column: str, text: Callable[[Row], str]) -> str:
    """Returns a table of the workloads by the values of a column, such as the way."""
    columns = list(dict.fromkeys(row[column] for row in rows))
    cells = {(row["name"], row[column]): text(row) for row in rows}
    names = dict.fromkeys(row["name"] for row in rows)
    lines = [[name, *(cells.get((name, value), "") for value in columns)] for name in names]
    return table(["workload", *map(str, columns)], lines)


def table(header: list[str], lines: Iterable[list[str]]) -> str:
    """Returns a table in Markdown."""
    separator = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, separator, *lines))


def gib(size: float, digits: int = 2) -> str:
    """Returns a number of bytes in GiB."""
    return f"{size / 2**30:.{digits}f}"
