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

pytest.importorskip("sphinx")
ROOT = pathlib.Path(__file__).parents[1]
EXTENSIONS = ROOT / "docs" / "_ext"


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
    pages = " ".join(extension("pages").CONTENTS.values()).split()
    found = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert found - {"index"} <= set(pages)


def test_links_lead_to_where_the_site_shows_a_file(extension) -> None:
    def seen(text: str) -> str:
        pages = extension("pages")
        return pages.LINK.sub(lambda found: pages._link(found, ROOT / "docs", "speed"), text)

    assert seen("[one](../examples/mnist.py)") == "[one](guides/mnist.md)"
    assert seen("[a](../CHANGELOG.md) [b](core.md#data)") == (
        "[a](more/changelog.md) [b](core.md#data)"
    )
    assert seen("[home](../README.md)") == "[home](index.md)"
    assert seen("a [file](../pyproject.toml) by itself") == "a file by itself"
    assert seen("[away](https://example.org/x)") == "[away](https://example.org/x)"


def test_a_word_alone_is_linked_for_a_class_only_unless_it_is_beside_it(extension) -> None:
    api = extension("api")
    names = api._public(api._names())
    assert names["TrainState"] == "functrain.TrainState"
    assert not {"step", "loss", "mode", "mean"} & names.keys()  # mostly arguments
    assert {"functrain.population.step", "bridge.loss"} <= names.keys()


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
