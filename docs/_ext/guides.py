"""A page for each example: its cells, and what a short run of it printed and drew.

A run is kept in `_build/guides` for as long as neither the example nor the packages change.
"""

import ast
import concurrent.futures
import hashlib
import pathlib
import re
import shutil
import subprocess
import sys

from pages import DOCS, ROOT, digest, write
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.display import status_iterator

EXAMPLES = ROOT / "examples"
RUNS = DOCS / "_build" / "guides"


def scripts() -> list[pathlib.Path]:
    """Returns the examples."""
    return sorted(EXAMPLES.glob("[a-z]*.py"))


def _run(script: pathlib.Path) -> pathlib.Path:
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
    command = [sys.executable, str(script), "--quick", "--output", str(begun)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise ExtensionError(f"{script} --quick failed\n{done.stderr}")
    (begun / "printed.txt").write_text(_settled(done.stdout).replace(str(begun), "examples/output"))
    return begun.rename(folder)


def _settled(text: str) -> str:
    """Returns what a terminal shows in the end: no colours, no line that was written over."""
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text)
    return "\n".join(line.rpartition("\r")[2] for line in text.splitlines()).strip()


def _page(script: pathlib.Path, folder: pathlib.Path) -> str:
    source = script.read_text()
    prose = ast.get_docstring(ast.parse(source)) or ""
    title, _, rest = prose.partition("\n\n")
    parts = [f"# `{script.name}`", f"**{title}**", rest]
    for cell in source.split("\n# %% ")[1:]:
        heading, _, code = cell.partition("\n")
        parts += [f"## {heading}", f"```py\n{code.strip()}\n```"]
    parts += [
        "## What it prints",
        f"    python examples/{script.name} --quick",
        f"```text\n{(folder / 'printed.txt').read_text()}\n```",
    ]
    for picture in sorted(folder.rglob("*.png")):
        path = DOCS / "guides" / script.stem / picture.name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, path)
        parts.append(f"![{picture.stem}]({script.stem}/{picture.name})")
    return "\n\n".join(parts) + "\n"


def _write(app: Sphinx) -> None:
    # Only the runs are in threads: Python 3.11 may fail where two of them parse at a time.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = zip(scripts(), pool.map(_run, scripts()), strict=True)
        told = {"length": len(scripts()), "stringify_func": lambda pair: pair[0].name}
        for script, folder in status_iterator(runs, "running examples... ", **told):
            write(DOCS / "guides" / f"{script.stem}.md", _page(script, folder))


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects it to the build."""
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True}
