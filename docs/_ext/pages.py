"""Turns pages of plain markdown into notebooks, whose python blocks are run and shown.

The pages stay plain markdown, so that other viewers show them, too. Each page runs in its own
folder, with a link to the examples and their data. A hidden first cell holds a digest of the code
of functrain and bridge: outputs that the notebook cache kept are used only as long as the code is
the same. Links to files of the repository lead to the page of the site that shows the file.
"""

import hashlib
import os
import pathlib
import re
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.errors import ExtensionError

DOCS = pathlib.Path(__file__).parents[1]
ROOT = DOCS.parent
SHOWN = {  # files outside docs/, and the pages that show them
    "README.md": "index",
    "CHANGELOG.md": "more/changelog",
    "CONTRIBUTING.md": "more/contributing",
    "benchmarks/README.md": "more/benchmarks",
    "benchmarks/results/applications.md": "more/applications",
    "benchmarks/results/layers.md": "more/layers",
    "benchmarks/results/hub.md": "more/hub",
}
CONTENTS = {  # the captions of the sidebar, and the pages under each
    "Using functrain": "getting-started training keras checkpoints devices accelerators "
    "populations performance comparison from-pytorch from-keras from-flax",
    "Guides": "guides/mnist guides/from_scratch guides/customize_fit guides/optax_in_keras "
    "guides/flax_model guides/eager_jit_fused guides/resume guides/several_hosts "
    "guides/long_run "
    "guides/will_it_fit guides/sweep guides/lora guides/ensemble guides/vae guides/distillation "
    "guides/text guides/pretrain guides/finetune guides/hugging_face guides/diffusion guides/ppo "
    "guides/dcgan",
    "API": "api/training api/steps api/models api/fusing api/checkpoints api/events api/hooks "
    "api/metrics api/tx api/inspect api/sharding api/targets api/distributed api/population "
    "api/export api/rewrites api/bridge",
    "Design": "design/index design/core-tour design/checkpoint-store design/loop-length "
    "design/rewrites",
    "Measurements": "more/benchmarks more/applications more/layers more/hub",
    "Project": "more/changelog more/contributing",
}
DEVICES = {"devices": 8, "from-flax": 8}  # devices a page runs on, if not one
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# An indented block right below a python block is the output that the page's author expects.
WRITTEN_OUTPUT = re.compile(r"(?<=^```\n)\n(?: {4}.*\n)+", re.MULTILINE)
LOADER_LOG = "Loading XLA:CPU AOT result"  # two lines of 2 kB for each program; see conf.py
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
    """Returns a digest of the code of both packages."""
    sha = hashlib.sha256()
    for package in ("functrain", "bridge"):
        for path in sorted((ROOT / package).rglob("*.py")):
            sha.update(path.read_bytes())
    return sha.hexdigest()


def _read(app: Sphinx, page: str, source: list[str]) -> None:
    """Changes the links of a page, and makes it a notebook if it has python blocks."""
    origin = next((ROOT / path for path, shown in SHOWN.items() if shown == page), None)
    folder = (origin or pathlib.Path(app.env.doc2path(page))).parent
    text = LINK.sub(lambda match: _link(match, folder, page), source[0])
    if BLOCK.search(text) and (origin is None or page == "index"):
        devices = DEVICES.get(page, 1)
        head = HEAD.format(digest=digest(), examples=str(ROOT / "examples"), devices=devices)
        text = WRITTEN_OUTPUT.sub("", text)  # the notebook shows the actual output
        text = head + BLOCK.sub(r"```{code-cell} python\n\1```", text)
    source[0] = text + _contents() if page == "index" else text


def _contents() -> str:
    """Returns the tables of contents for the sidebar."""
    text = ""
    for caption, pages in CONTENTS.items():
        options = f":caption: {caption}\n:hidden:\n"
        text += "\n".join(["", "```{toctree}", options, *pages.split(), "```", ""])
    return text


def _link(match: re.Match[str], folder: pathlib.Path, page: str) -> str:
    """Returns a markdown link with the target that it has on the site."""
    picture, words, path, part = match.groups()
    target = pathlib.Path(os.path.normpath(folder / path))
    if not target.is_relative_to(ROOT) or not target.exists():
        return match[0]
    inside = target.relative_to(ROOT).as_posix()
    if picture:
        return f"![{words}]({os.path.relpath(target, (DOCS / page).parent)})"
    if target.parent == ROOT / "examples" and target.suffix == ".py":
        inside = f"docs/guides/{target.stem}.md"
    elif target == DOCS:
        inside = "docs/index.md"
    elif inside in SHOWN:
        inside = f"docs/{SHOWN[inside]}.md"
    elif not target.is_relative_to(DOCS):
        return words  # the site does not show this file
    return f"[{words}]({os.path.relpath(ROOT / inside, (DOCS / page).parent)}{part or ''})"


def _line(path: pathlib.Path, traceback: str) -> str:
    """Returns the line of a page that failed, from a traceback that counts cells and lines."""
    match = re.search(r"Cell In\[(\d+)\], line (\d+)", traceback)
    if match is None:
        return ""
    cell, line = map(int, match.groups())
    text = path.read_text()
    starts = [block.start(1) for block in BLOCK.finditer(text)]
    start = starts[cell - 2]  # cells count from 1, and the first is the hidden one
    return f":{text.count(chr(10), 0, start) + line}"


def _require_all_ran(app: Sphinx, env: BuildEnvironment) -> None:
    """Raises ExtensionError if a block of a page failed."""
    failed = []
    for page, data in getattr(env, "nb_metadata", {}).items():
        run = data.get("exec_data") or {}
        if run.get("error"):
            path = pathlib.Path(env.doc2path(page))
            traceback = re.sub(r"\x1b\[[\d;]*m", "", run["traceback"] or "")
            failed.append(f"{path}{_line(path, traceback)}: a block failed\n{traceback}")
    if failed:
        raise ExtensionError("\n".join(failed))


def _require_no_noise(
    app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
    """Raises ExtensionError if a page shows the log of XLA's loader."""
    if LOADER_LOG in context.get("body", ""):
        raise ExtensionError(f"{page}: expected no log of XLA in its outputs, got {LOADER_LOG!r}")


def _write_shown(app: Sphinx) -> None:
    """Copies the files outside docs/ that the site shows."""
    for path, page in SHOWN.items():
        write(DOCS / f"{page}.md", (ROOT / path).read_text())


def _write_for_language_models(app: Sphinx, exception: Exception | None) -> None:
    """Writes the pages as markdown, and llms.txt, which lists them: see https://llmstxt.org."""
    if app.builder.format != "html" or exception is not None:
        return
    lines = ["# functrain", "", f"> {_first_paragraph((ROOT / 'README.md').read_text())}"]
    for caption in ("Using functrain", "Guides"):
        lines += ["", f"## {caption}", ""]
        for page in CONTENTS[caption].split():
            text = (DOCS / f"{page}.md").read_text()
            write(pathlib.Path(app.outdir, f"{page}.md"), text)
            title = text.partition("\n")[0].removeprefix("# ")
            url = f"{app.config.html_baseurl}{page}.md"
            lines.append(f"- [{title}]({url}): {_first_paragraph(text).partition('. ')[0]}")
    write(pathlib.Path(app.outdir, "llms.txt"), "\n".join([*lines, ""]))


def _first_paragraph(text: str) -> str:
    paragraphs = [part for part in text.split("\n\n") if not part.startswith("#")]
    return " ".join(paragraphs[0].strip("*").split())


def write(path: pathlib.Path, text: str) -> None:
    """Writes a generated page, unless the file has this text already."""
    path.parent.mkdir(exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the extension to the build."""
    app.connect("builder-inited", _write_shown)
    app.connect("source-read", _read)
    app.connect("env-updated", _require_all_ran)
    app.connect("html-page-context", _require_no_noise)
    app.connect("build-finished", _write_for_language_models)
    return {"parallel_read_safe": True}
