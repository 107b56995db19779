"""A page for each example: its cells, and what a full run of it printed and drew.

Full runs are stored in `docs/results` (see `full_runs`). Every example is run for a short time as
well, so that one that fails stops the build; a guide without a full run shows that. A short run is
kept in `_build/guides` for as long as neither the example nor the packages change.
"""

import ast
import concurrent.futures
import hashlib
import itertools
import json
import pathlib
import re
import shutil
from typing import Any, NamedTuple

from full_runs import ABOUT, EXAMPLES, PRINTED, RESULTS, code_digest, run, scripts
from pages import DOCS, digest, write
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.display import status_iterator

RUNS = DOCS / "_build" / "guides"
SENTENCE_END = re.compile(r"(?<=\D)\.\s+")  # not that of a number, as in "1. Data"
SHORT = """\
No full run of this guide has been stored yet. This is what a short run prints and draws: it shows
that the code works, and is too short to reach what the text above says."""


class Cell(NamedTuple):
    """A cell of an example: its heading, the sentences after it, and its code."""

    heading: str
    prose: str
    code: str


def cells(source: str) -> list[Cell]:
    """Returns the cells of an example, headed by the first sentence of the comment over each."""
    found = []
    for cell in source.split("\n# %% ")[1:]:
        first, *rest = cell.splitlines()
        more = list(itertools.takewhile(lambda line: line.startswith("# "), rest))
        comment = " ".join([first, *(line.removeprefix("# ") for line in more)])
        heading, *prose = SENTENCE_END.split(comment, maxsplit=1)
        sentences = "".join(prose)
        if sentences and not sentences.endswith((".", ".)")):
            sentences += "."
        found.append(Cell(heading, sentences, "\n".join(rest[len(more) :]).strip()))
    return found


def _short_run(script: pathlib.Path) -> pathlib.Path:
    """Returns the folder of a short run: what it printed, and what it drew."""
    sha = hashlib.sha256(digest().encode() + script.read_bytes())
    sha.update((EXAMPLES / "_example.py").read_bytes())
    folder = RUNS / f"{script.stem}-{sha.hexdigest()[:16]}"
    if folder.exists():
        return folder
    for old in RUNS.glob(f"{script.stem}-*"):
        shutil.rmtree(old)
    begun = RUNS / f"{script.stem}-begun"
    begun.mkdir(parents=True)
    try:
        (begun / PRINTED).write_text(run(script, begun, "--quick"))
    except RuntimeError as error:
        raise ExtensionError(str(error)) from error
    return begun.rename(folder)


def _results(script: pathlib.Path, short: pathlib.Path) -> tuple[str, pathlib.Path]:
    """Returns in words which run a page shows, and the folder of that run."""
    full = RESULTS / script.stem
    if not (full / ABOUT).exists():
        return SHORT, short
    about = json.loads((full / ABOUT).read_text())
    return _described(about, is_current=about.get("code") == code_digest(script)), full


def _described(about: dict[str, Any], *, is_current: bool) -> str:
    """Returns in words what is known of a full run."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    processor = f" of an {about['processor']}" if "processor" in about else ""
    minutes = f" It took {about['minutes']:g} minutes." if "minutes" in about else ""
    text = f"A full run of {about['date']}, on {about['cores']} cores{processor}: {versions}."
    text += minutes + (f" {about['note']}" if "note" in about else "")
    if about.get("machine_was_busy"):
        text += " The machine had other work to do: its times and rates are no measurements."
    return text if is_current else text + " The code has changed since."


def _page(script: pathlib.Path, short: pathlib.Path) -> str:
    source = script.read_text()
    prose = ast.get_docstring(ast.parse(source)) or ""
    title, _, rest = prose.partition("\n\n")
    parts = [f"# `{script.name}`", f"**{title}**", rest]
    for heading, sentences, code in cells(source):
        parts += [f"## {heading}", sentences, f"```py\n{code}\n```"]
    about, folder = _results(script, short)
    option = " --quick" if folder == short else ""
    parts += ["## What it prints and draws", f"    python examples/{script.name}{option}", about]
    if (folder / PRINTED).exists():
        parts.append(f"```text\n{(folder / PRINTED).read_text().rstrip()}\n```")
    parts += [f"![{x.stem}]({script.stem}/{x.name})" for x in sorted(folder.rglob("*.png"))]
    return "\n\n".join(filter(None, parts)) + "\n"


def _write_page(script: pathlib.Path, short: pathlib.Path) -> None:
    target = DOCS / "guides" / script.stem
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for picture in _results(script, short)[1].rglob("*.png"):
        shutil.copy(picture, target)
    write(DOCS / "guides" / f"{script.stem}.md", _page(script, short))


def _write(app: Sphinx) -> None:
    # Only the runs are in threads: Python 3.11 may fail where two of them parse at a time.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = zip(scripts(), pool.map(_short_run, scripts()), strict=True)
        told = {"length": len(scripts()), "stringify_func": lambda pair: pair[0].name}
        for script, short in status_iterator(runs, "running examples... ", **told):
            _write_page(script, short)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects it to the build."""
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True}
