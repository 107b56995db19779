"""The site has every public name, and a block that fails stops its build, by page and line.

`make docs` builds the site itself, and runs every block of it.
"""

import importlib
import os
import pathlib
import subprocess
import sys
import types
from typing import Any

import pytest

import bridge
import functrain

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("sphinx")
ROOT = pathlib.Path(__file__).parents[1]
EXTENSIONS = ROOT / "docs" / "_ext"
SCRIPTS = sorted((ROOT / "examples").glob("[a-z]*.py"))


@pytest.fixture
def extension(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports what the build of the site imports."""
    monkeypatch.syspath_prepend(EXTENSIONS)
    return importlib.import_module


def test_every_public_name_has_a_page_of_the_site(extension) -> None:
    shown = {name for names in extension("api")._names().values() for name in names}
    for package in (functrain, bridge):
        for name in package.__all__:
            value, full = getattr(package, name), f"{package.__name__}.{name}"
            inside = getattr(value, "__all__", ()) if isinstance(value, types.ModuleType) else ()
            assert name == "__version__" or {full, *(f"{full}.{x}" for x in inside)} & shown
            assert {f"{full}.{x}" for x in inside} <= shown


def test_every_page_has_a_place_in_the_sidebar(extension) -> None:
    pages = set(" ".join(extension("pages").CONTENTS.values()).split())
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"} <= pages
    assert {f"api/{file}" for file in extension("api").PAGES} <= pages
    assert {f"guides/{script.stem}" for script in SCRIPTS} <= pages
    assert set(extension("pages").SHOWN.values()) <= pages | {"index"}


def test_members_that_the_api_pages_hide_exist(extension) -> None:
    api = extension("api")
    # Each class has some of these.
    shared = {*api.HOOK_METHODS.split(), *api.LOADER_METHODS.split()}
    for name, members in api.HIDDEN_MEMBERS.items():
        missing = {x for x in members.split() if not hasattr(api._get(name), x)}
        assert missing <= shared
    classes = list(map(api._get, api.HIDDEN_MEMBERS))
    assert [x for x in shared if not any(hasattr(c, x) for c in classes)] == []


def test_classes_without_a_signature_on_the_api_pages_are_public(extension) -> None:
    api = extension("api")
    public = {name.rpartition(".")[2] for names in api._names().values() for name in names}
    assert public >= api.RECEIVED


def test_links_lead_to_where_the_site_shows_a_file(extension) -> None:
    def seen(text: str) -> str:
        pages = extension("pages")
        return pages.LINK.sub(lambda found: pages._link(found, ROOT / "docs", "speed"), text)

    assert seen("[one](../examples/mnist.py)") == "[one](guides/mnist.md)"
    assert seen("[a](../CHANGELOG.md) [b](training.md#data)") == (
        "[a](more/changelog.md) [b](training.md#data)"
    )
    assert seen("[home](../README.md)") == "[home](index.md)"
    assert seen("a [file](../pyproject.toml) by itself") == "a file by itself"
    assert seen("[away](https://example.org/x)") == "[away](https://example.org/x)"


def test_lines_of_gloo_that_threads_have_cut_are_not_stored_with_a_run(extension) -> None:
    without_gloo = extension("full_runs").without_gloo
    said = " is connected to 7 peer ranks. Expected number of connected peer ranks is : 7"
    whole, cut = f"[Gloo] Rank 0{said}", f"[Gloo] Rank 0 is connected to 7[1] [Gloo] Rank 45{said}"
    rest = [f"[1] {said}7", "[1] ", "7"]
    assert without_gloo(["one", whole, cut, *rest, "", "[1] two"]) == ["one", "", "[1] two"]
    assert without_gloo(["7", "one"]) == ["7", "one"]


@pytest.fixture
def short_run(tmp_path: pathlib.Path) -> pathlib.Path:
    """What a short run of an example left."""
    (tmp_path / "printed.txt").write_text("of a short run")
    return tmp_path


def test_the_comment_over_a_cell_is_a_heading_and_sentences_after_it(extension) -> None:
    source = '"""A title."""\n\n# %% 1. The step: 2.5 of it. It\n# goes on\nx = 1  # why\n'
    assert extension("guides").cells(source) == [
        ("1. The step: 2.5 of it", "It goes on.", "x = 1  # why")
    ]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_guide_shows_a_stored_full_run_or_says_that_there_is_none(
    extension, script, short_run
) -> None:
    page = extension("guides")._page(script, short_run)
    stored = ROOT / "docs" / "results" / script.stem
    assert ("No full run of this guide has been stored yet" in page) == (not stored.exists())
    assert ("of a short run" in page) == (f"examples/{script.name} --quick\n\nNo full run" in page)
    assert page.startswith(f"# {extension('guides').TITLES[script.stem]}\n")
    for picture in stored.glob("*.png"):
        assert f"({script.stem}/{picture.name})" in page


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_are_its_script(extension, script, short_run) -> None:
    notebook = extension("guides").notebook(script, short_run)
    _, *cells, _ = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    at = 0
    for cell in cells:
        at = script.read_text().index(cell, at)
    nbformat.validate(notebook)


@pytest.mark.parametrize(
    ("name", "installed"), [("text", ""), ("pretrain", " grain"), ("finetune", " keras-hub")]
)
def test_a_notebook_installs_the_further_packages_of_its_script(
    extension, short_run, name, installed
) -> None:
    notebook = extension("guides").notebook(ROOT / "examples" / f"{name}.py", short_run)
    assert f'"./functrain-repository[plot]"{installed}\n' in notebook.cells[1].source


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eager_jit_fused", "resume"])
def test_a_notebook_runs_and_shows_its_pictures(extension, short_run, monkeypatch, name) -> None:
    from nbclient import NotebookClient

    notebook = extension("guides").notebook(ROOT / "examples" / f"{name}.py", short_run)
    output = str(short_run / "output")
    notebook.cells[1].source += f'\nsys.argv += ["--output", {output!r}]'
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    NotebookClient(notebook, resources={"metadata": {"path": ROOT / "examples"}}).execute()
    pictures = [x for x in notebook.cells[-2].outputs if "image/png" in x.get("data", {})]
    assert len(pictures) == 1
    printed = "".join(x.get("text", "") for cell in notebook.cells for x in cell.get("outputs", ()))
    assert {"eager_jit_fused": "fused", "resume": "killed twice"}[name] in printed


def test_what_a_page_says_a_block_prints_gives_way_to_what_it_prints(extension) -> None:
    block, shell = "```python\nprint(1)\n```\n", "\nand\n\n    make test\n"
    written = extension("pages").WRITTEN_OUTPUT
    assert written.sub("", f"{block}\n    1\n{shell}") == f"{block}{shell}"


def test_a_block_that_fails_stops_the_build_with_page_and_line(tmp_path: pathlib.Path) -> None:
    (tmp_path / "conf.py").write_text(
        f"import sys\nsys.path.append({str(EXTENSIONS)!r})\n"
        "extensions = ['myst_nb', 'pages']\nnb_execution_mode = 'force'\n"
    )
    text = "# A page\n\n```python\na = 1\n```\n\nand\n\n```python\nb = a\nb.missing\n```\n"
    (tmp_path / "index.md").write_text(text)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", ".", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert done.returncode != 0
    assert f"{tmp_path / 'index.md'}:11: a block failed" in done.stderr
    assert "'int' object has no attribute 'missing'" in done.stderr


def test_the_log_of_xla_on_a_page_stops_the_build(extension) -> None:
    pages = extension("pages")
    from sphinx.errors import ExtensionError

    with pytest.raises(ExtensionError, match=r"training: expected no log of XLA"):
        pages._require_no_noise(None, "training", "", {"body": f"<p>E1 {pages.LOADER_LOG}"}, None)
    pages._require_no_noise(None, "training", "", {"body": "<p>loss"}, None)
