"""Writes a page and a notebook for each example: its cells, and the output of a full run.

The full runs are stored in `docs/results` (see `full_runs`). The build also runs every example for
a short time, so that an example that fails stops the build, unless a package that only this example
needs is missing. A guide shows its short run only as long as no full run is stored. Short runs are
kept in `_build/guides` until the example or the packages change.
"""

import ast
import base64
import concurrent.futures
import hashlib
import itertools
import json
import pathlib
import re
import shutil
from typing import Any, NamedTuple

import nbformat.v4
from full_runs import (
    ABOUT,
    EXAMPLES,
    PRINTED,
    RESULTS,
    code_digest,
    missing_packages,
    run,
    scripts,
)
from pages import DOCS, digest, write
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.display import status_iterator

RUNS = DOCS / "_build" / "guides"
SENTENCE_END = re.compile(r"(?<=\D)\.\s+")  # the period after a number, as in "1. Data", ends none
PACKAGE = re.compile(r'"\w+": "pip install( [\w-]+)"')  # in the options of an example
SHORT = """\
No full run of this guide has been stored yet. The output below is from a short run. It shows that
the code works, and does not reach the results that the text mentions."""
# The first cell of a notebook.
INSTALL = """\
import pathlib, sys

if not pathlib.Path("_example.py").exists():  # the notebook is not among the examples
    !git clone --quiet --depth 1 https://github.com/functrain/functrain functrain-repository
    %pip install --quiet "./functrain-repository[plot]"{packages}
    %cd functrain-repository/examples

sys.argv = ["{name}", "--quick"]  # without "--quick", the notebook runs in full"""
# The last one.
PICTURES = """\
from IPython.display import Image, display

for picture in sorted(args.output.rglob("*.png")):
    display(Image(picture))"""
TITLES = {
    "customize_fit": "Custom training steps in fit",
    "dcgan": "DCGAN",
    "diffusion": "Diffusion model",
    "distillation": "Knowledge distillation",
    "eager_jit_fused": "Eager, jitted and fused steps",
    "ensemble": "Deep ensemble",
    "finetune": "Fine-tuning with keras_hub",
    "flax_model": "Flax models",
    "from_scratch": "A training loop from scratch",
    "hugging_face": "Weights of Hugging Face",
    "long_run": "A run for a week",
    "lora": "Adapters for eight tasks",
    "mnist": "MNIST with Keras and optax",
    "optax_in_keras": "Optax optimizers in Keras",
    "ppo": "Reinforcement learning with PPO",
    "pretrain": "Pretraining a GPT",
    "resume": "Resuming a killed run",
    "several_hosts": "Several devices and hosts",
    "sweep": "Learning-rate sweep",
    "text": "Transformer language model",
    "vae": "Variational autoencoder",
    "will_it_fit": "Memory and cost before renting a device",
}


class Cell(NamedTuple):
    """A cell of an example: its heading, the sentences after it, and its code."""

    heading: str
    prose: str
    code: str


def cells(source: str) -> list[Cell]:
    """Returns the cells of an example, headed by the first sentence of the comment over each."""
    parsed = []
    for cell in source.split("\n# %% ")[1:]:
        first, *rest = cell.splitlines()
        more = list(itertools.takewhile(lambda line: line.startswith("# "), rest))
        comment = " ".join([first, *(line.removeprefix("# ") for line in more)])
        heading, *prose = SENTENCE_END.split(comment, maxsplit=1)
        sentences = "".join(prose)
        if sentences and not sentences.endswith((".", ".)")):
            sentences += "."
        parsed.append(Cell(heading, sentences, "\n".join(rest[len(more) :]).strip()))
    return parsed


def _short_run(script: pathlib.Path) -> pathlib.Path:
    """Returns the folder with the output and pictures of a short run.

    For an example whose packages are missing, this is the folder of its full run.
    """
    if missing := missing_packages(script):
        if not (RESULTS / script.stem / ABOUT).exists():
            raise ExtensionError(f"{script.name} needs {missing}, and no full run is stored")
        return RESULTS / script.stem
    sha = hashlib.sha256(digest().encode() + script.read_bytes())
    sha.update((EXAMPLES / "_example.py").read_bytes())
    folder = RUNS / f"{script.stem}-{sha.hexdigest()[:16]}"
    if folder.exists():
        return folder
    for old in RUNS.glob(f"{script.stem}-*"):
        shutil.rmtree(old)
    unfinished = RUNS / f"{script.stem}-unfinished"
    unfinished.mkdir(parents=True)
    try:
        (unfinished / PRINTED).write_text(run(script, unfinished, "--quick"))
    except RuntimeError as error:
        raise ExtensionError(str(error)) from error
    return unfinished.rename(folder)


def _results(script: pathlib.Path, short: pathlib.Path) -> tuple[str, pathlib.Path]:
    """Returns a description of the run that a page shows, and the folder of that run."""
    full = RESULTS / script.stem
    if not (full / ABOUT).exists():
        return SHORT, short
    about = json.loads((full / ABOUT).read_text())
    return _described(about, is_current=about.get("code") == code_digest(script)), full


def _described(about: dict[str, Any], *, is_current: bool) -> str:
    """Returns a description of a full run: its date, machine, versions and duration."""
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    processor = f" of an {about['processor']}" if "processor" in about else ""
    minutes = f" It took {about['minutes']:g} minutes." if "minutes" in about else ""
    text = f"A full run of {about['date']}, on {about['cores']} cores{processor}: {versions}."
    text += minutes + (f" {about['note']}" if "note" in about else "")
    if about.get("machine_was_busy"):
        text += (
            " The machine was busy with other work, so its times and rates are not measurements."
        )
    return text if is_current else text + " The code has changed since then."


def _introduction(script: pathlib.Path) -> list[str]:
    """Returns the paragraphs above the cells of an example."""
    prose = ast.get_docstring(ast.parse(script.read_text())) or ""
    summary, _, rest = prose.partition("\n\n")
    return [f"# {TITLES[script.stem]}", f"**{summary}**", rest]


def _output(script: pathlib.Path, short: pathlib.Path) -> tuple[list[str], list[pathlib.Path]]:
    """Returns the paragraphs below the cells of an example, and its pictures."""
    about, folder = _results(script, short)
    option = "" if folder == RESULTS / script.stem else " --quick"
    parts = ["## Output", f"    python examples/{script.name}{option}", about]
    if (folder / PRINTED).exists():
        parts.append(f"```text\n{(folder / PRINTED).read_text().rstrip()}\n```")
    return parts, sorted(folder.rglob("*.png"))


def _page(script: pathlib.Path, short: pathlib.Path) -> str:
    """Returns the page of an example as markdown."""
    name = script.stem
    parts = [*_introduction(script), f"{{download}}`As a notebook <{name}/{name}.ipynb>`"]
    for heading, sentences, code in cells(script.read_text()):
        parts += [f"## {heading}", sentences, f"```py\n{code}\n```"]
    output, pictures = _output(script, short)
    parts += [*output, *(f"![{picture.stem}]({name}/{picture.name})" for picture in pictures)]
    return "\n\n".join(filter(None, parts)) + "\n"


def notebook(script: pathlib.Path, short: pathlib.Path) -> nbformat.NotebookNode:
    """Returns an example as a notebook that installs what it needs and runs anywhere."""
    text, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    packages = "".join(PACKAGE.findall(script.read_text()))
    install = code(INSTALL.format(name=script.name, packages=packages))
    parts = [text("\n\n".join(_introduction(script))), install]
    for heading, sentences, source in cells(script.read_text()):
        parts += [text(f"## {heading}\n\n{sentences}".strip()), code(source)]
    output, pictures = _output(script, short)
    shown = [f"![{picture.stem}](attachment:{picture.name})" for picture in pictures]
    attachments = {
        picture.name: {"image/png": base64.b64encode(picture.read_bytes()).decode()}
        for picture in pictures
    }
    parts += [code(PICTURES), text("\n\n".join([*output, *shown]), attachments=attachments)]
    for number, part in enumerate(parts):
        part["id"] = f"cell-{number}"  # otherwise random, and each build would differ
    return nbformat.v4.new_notebook(cells=parts)


def _write_page(script: pathlib.Path, short: pathlib.Path) -> None:
    """Writes the page and the notebook of an example, and copies its pictures."""
    target = DOCS / "guides" / script.stem
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for picture in _output(script, short)[1]:
        shutil.copy(picture, target)
    nbformat.write(notebook(script, short), target / f"{script.stem}.ipynb")
    write(DOCS / "guides" / f"{script.stem}.md", _page(script, short))


def _write(app: Sphinx) -> None:
    """Runs every example for a short time, and writes its page."""
    # Only the runs are in threads: Python 3.11 may fail if two threads parse at the same time.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = zip(scripts(), pool.map(_short_run, scripts()), strict=True)
        options = {"length": len(scripts()), "stringify_func": lambda pair: pair[0].name}
        for script, short in status_iterator(runs, "running examples... ", **options):
            _write_page(script, short)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects the extension to the build."""
    app.connect("builder-inited", _write)
    return {"parallel_read_safe": True}
