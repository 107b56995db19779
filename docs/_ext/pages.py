"""Pages of plain markdown as notebooks: what stands in their python blocks is run and shown.

The pages stay what other viewers of markdown expect. Each runs in a folder of its own, with the
examples' data; a hidden first cell holds a digest of the code of functrain and bridge, so that what
is kept of an earlier build is as old as the code. Links to files of the repository lead to where
the site shows them.
"""

import hashlib
import os
import pathlib
import re

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

DOCS = pathlib.Path(__file__).parents[1]
ROOT = DOCS.parent
SHOWN = {  # files beside docs/, and the pages that show them
    "CHANGELOG.md": "more/changelog",
    "CONTRIBUTING.md": "more/contributing",
    "benchmarks/README.md": "more/benchmarks",
    "benchmarks/results/applications.md": "more/applications",
    "benchmarks/results/layers.md": "more/layers",
    "benchmarks/results/hub.md": "more/hub",
    "benchmarks/results/profiles.md": "more/profiles",
}
CONTENTS = {  # the sidebar: captions, and the pages under each in their order
    "Using functrain": "getting-started training keras checkpoints devices populations performance "
    "migrating",
    "Former pages": "engine going-on population promises rewrites scaling sharding speed",
    "Guides": "guides/*",
    "API": "api/*",
    "Design": "design/index design/checkpoint-store design/loop-length design/rewrites",
    "Measurements": "more/benchmarks more/profiles more/applications more/layers more/hub",
    "Project": "more/changelog more/contributing",
}
DEVICES = {"devices": 8, "sharding": 8, "scaling": 8}  # devices a page runs on, if not one
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WRITTEN_OUTPUT = re.compile(r"(?<=^```\n)\n(?: {4}.*\n)+", re.MULTILINE)  # right below a block
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")
HEAD = """\
---
file_format: mystnb
kernelspec: {{name: python3, display_name: python3, language: python}}
language_info: {{name: python, pygments_lexer: ipython3}}
---

```{{code-cell}} python
:tags: [remove-cell]
# {digest}
import os, pathlib, tempfile
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ["JUPYTER_COLUMNS"] = "100"  # of rich's bars
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count={devices}"
os.chdir(tempfile.mkdtemp())
pathlib.Path("examples").symlink_to({examples!r})
```

"""


def digest() -> str:
    """Returns what the code of both packages is known by."""
    sha = hashlib.sha256()
    for package in ("functrain", "bridge"):
        for path in sorted((ROOT / package).rglob("*.py")):
            sha.update(path.read_bytes())
    return sha.hexdigest()


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    origin = next((ROOT / path for path, shown in SHOWN.items() if shown == page), None)
    folder = (origin or pathlib.Path(app.env.doc2path(page))).parent
    text = LINK.sub(lambda found: _link(found, folder, page), source[0])
    if BLOCK.search(text) and origin is None:
        devices = DEVICES.get(page, 1)
        head = HEAD.format(digest=digest(), examples=str(ROOT / "examples"), devices=devices)
        text = WRITTEN_OUTPUT.sub("", text)  # the site shows what the block prints
        text = head + BLOCK.sub(r"```{code-cell} python\n\1```", text)
    source[0] = text + _contents() if page == "index" else text


def _contents() -> str:
    """Returns the tables of contents that the sidebar shows."""
    text = ""
    for caption, pages in CONTENTS.items():
        names = [page for page in pages.split() if "*" in page or (DOCS / f"{page}.md").exists()]
        options = f":caption: {caption}\n:hidden:\n" + ":glob:\n" * ("*" in pages)
        text += "\n".join(["", "```{toctree}", f"{options}", *names, "```", ""])
    return text


def _link(found: re.Match[str], folder: pathlib.Path, page: str) -> str:
    """Returns a link of markdown as it is to stand on the site."""
    picture, words, path, part = found.groups()
    target = pathlib.Path(os.path.normpath(folder / path))
    if not target.is_relative_to(ROOT) or not target.exists():
        return found[0]
    inside = target.relative_to(ROOT).as_posix()
    if picture:
        return f"![{words}]({os.path.relpath(target, (DOCS / page).parent)})"
    if target.parent == ROOT / "examples" and target.suffix == ".py":
        inside = f"docs/guides/{target.stem}.md"
    elif inside == "README.md" or target == DOCS:
        inside = "docs/index.md"
    elif inside in SHOWN:
        inside = f"docs/{SHOWN[inside]}.md"
    elif not target.is_relative_to(DOCS):
        return words  # a file that the site does not show
    return f"[{words}]({os.path.relpath(ROOT / inside, (DOCS / page).parent)}{part or ''})"


def _line(path: pathlib.Path, traceback: str) -> str:
    """Returns which line of a page failed, of a traceback that counts cells and their lines."""
    found = re.search(r"Cell In\[(\d+)\], line (\d+)", traceback)
    if found is None:
        return ""
    cell, line = map(int, found.groups())
    text = path.read_text()
    start = [block.start(1) for block in BLOCK.finditer(text)][cell - 2]  # the first is hidden
    return f":{text.count(chr(10), 0, start) + line}"


def _require_all_ran(app: Sphinx, env: BuildEnvironment) -> None:
    failed = []
    for page, data in getattr(env, "nb_metadata", {}).items():
        run = data.get("exec_data") or {}
        if run.get("error"):
            path = pathlib.Path(env.doc2path(page))
            traceback = re.sub(r"\x1b\[[\d;]*m", "", run["traceback"] or "")
            failed.append(f"{path}{_line(path, traceback)}: a block failed\n{traceback}")
    if failed:
        raise ExtensionError("\n".join(failed))


def _write_shown(app: Sphinx) -> None:
    for path, page in SHOWN.items():
        write(DOCS / f"{page}.md", (ROOT / path).read_text())


def write(path: pathlib.Path, text: str) -> None:
    """Writes a page that is made by the build, unless it stands there already."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects them to the build."""
    app.connect("builder-inited", _write_shown)
    app.connect("source-read", _read)
    app.connect("env-updated", _require_all_ran)
    return {"parallel_read_safe": True}
