"""What the pages say: their code runs as it stands, and all that they name is there."""

import ast
import contextlib
import io
import pathlib
import re
import shlex
import subprocess
import sys
import tokenize
from typing import Any

import jax
import numpy as np
import pytest

import bridge
import functrain

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
IN_DOCS = sorted({*DOCS.glob("*.md")} - {DOCS / "index.md"})  # the build makes that of the README
PAGES = [README, *IN_DOCS, *sorted(DOCS.glob("design/*.md"))]
WITH_CODE = [page for page in PAGES if "```python" in page.read_text()]
FOR_CONTRIBUTORS = [ROOT / f"{name}.md" for name in ("CONTRIBUTING", "RELEASING", "SECURITY")]
NAMING = [*PAGES, *FOR_CONTRIBUTORS, *sorted(ROOT.glob("benchmarks/*.md"))]
TEMPLATES = sorted(ROOT.glob(".github/*/*.yml"))
MADE_BY_RUNNING = ("examples/output", "benchmarks/output", "docs/_build")


def named(page: pathlib.Path) -> str:
    return page.name


def blocks(page: pathlib.Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def run(page: pathlib.Path) -> dict[str, Any]:
    """Runs the blocks of a page from top to bottom and returns the names they made."""
    names: dict[str, Any] = {}
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), names)
    return names


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """An empty folder to run in, with the examples' data."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_first_block_of_the_readme_is_short_and_trains() -> None:
    first = blocks(README)[0]
    assert len(first.strip().splitlines()) <= 15
    names: dict[str, Any] = {}
    exec(compile(first, "README.md", "exec"), names)
    assert int(names["model"].optimizer.iterations) == 5 * 282
    assert names["history"].history["accuracy"][-1] > 0.9


def marked(page: pathlib.Path) -> Any:
    """Some pages every interpreter has to run; all but README.md are run when the site is made."""
    is_readme = page == README
    everywhere = is_readme or page.name in ("training.md", "devices.md")
    marks = [pytest.mark.smoke] * everywhere + [pytest.mark.long] * (not is_readme)
    return pytest.param(page, id=named(page), marks=marks)


def test_the_readme_is_a_screen_and_asks_for_no_clone() -> None:
    assert len(README.read_text().splitlines()) < 120
    assert not [block for block in blocks(README) if "examples/" in block]


@pytest.mark.parametrize("page", [marked(page) for page in WITH_CODE])
def test_the_code_of_a_page_runs(page: pathlib.Path, folder: pathlib.Path) -> None:
    run(page)


def test_what_the_pages_show_is_code_that_is_run() -> None:
    for page in PAGES:
        kinds = re.findall(r"^```(\w*)$", page.read_text(), re.MULTILINE)[::2]
        assert set(kinds) <= {"python"}, f"{page}: shell commands are indented, code is python"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names that the page on checkpoints defines; its functions use the current folder."""
    with contextlib.chdir(tmp_path_factory.mktemp("checkpoints")):
        return run(DOCS / "checkpoints.md")


@pytest.mark.parametrize("step", [1, 49, 51, 199])
def test_the_recipe_for_resuming_works_at_every_step(
    step: int, recipe: dict[str, Any], folder: pathlib.Path
) -> None:
    interrupted(recipe, step)
    assert_equal(recipe["train_it"]().state, recipe["straight"].state)
    lines = pathlib.Path("run.csv").read_text().splitlines()[1:]
    assert [line.split(",")[:2] for line in lines] == [[str(e), str(50 * e + 50)] for e in range(4)]


def interrupted(recipe: dict[str, Any], step: int) -> None:
    """Begins, and ends at a step."""

    @functrain.at(step)
    def power_cut(event: Any) -> None:
        raise SystemExit

    with contextlib.suppress(SystemExit):
        recipe["train_it"](power_cut)


def assert_equal(state: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(keyless(a), keyless(b))


def keyless(x: Any) -> Any:
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


@pytest.mark.parametrize("page", NAMING, ids=named)
def test_every_path_that_is_named_exists(page: pathlib.Path) -> None:
    text = page.read_text()
    folders = r"(?:functrain|bridge|tests|examples|benchmarks|docs|\.ci)"
    paths = set(re.findall(rf"(?<![\w/.-]){folders}/[\w./-]*[\w/]", text))
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^):]+)\)", text)}
    missing = [path for path in sorted(paths) if not (ROOT / path).exists()]
    missing += [link for link in sorted(links) if not (page.parent / link).exists()]
    assert not [path for path in missing if not path.startswith(MADE_BY_RUNNING)]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_heading_that_is_linked_to_exists(page: pathlib.Path) -> None:
    for link in re.findall(r"\]\(([^):]*#[^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]


@pytest.mark.parametrize("page", [*NAMING, *TEMPLATES], ids=named)
def test_every_public_name_that_is_written_exists(page: pathlib.Path) -> None:
    for short, package in (("ft", functrain), ("bridge", bridge)):
        for dotted in set(re.findall(rf"\b{short}\.(?!md\b)([A-Za-z_][\w.]*\w)", page.read_text())):
            thing: Any = package
            for name in dotted.split("."):
                assert hasattr(thing, name), f"{page.name}: {short}.{dotted}"
                thing = getattr(thing, name)


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *DOCS.glob("design/*.md")], ids=named)
def test_every_private_function_that_is_named_exists(page: pathlib.Path) -> None:
    files = [*ROOT.glob("functrain/**/*.py"), *ROOT.glob("bridge/**/*.py")]
    defined = {name for path in files for name in re.findall(r"def (\w+)", path.read_text())}
    private = {*re.findall(r"`(?:\w+\.)?(_[a-z]\w+)`", page.read_text())}
    assert private - defined == set()


def test_the_readme_lists_every_page() -> None:
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)\)", README.read_text()))
    assert linked == {page.name for page in IN_DOCS}


def test_the_examples_that_are_listed_are_all_there_are() -> None:
    listed = re.findall(r"^\| \[`(\w+\.py)`\]", (DOCS / "getting-started.md").read_text(), re.M)
    assert sorted(listed) == sorted(path.name for path in ROOT.glob("examples/[a-z]*.py"))


def lines_of_code(path: pathlib.Path) -> int:
    """Counts the lines of a file without blank lines, comments and docstrings."""
    text = path.read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.string.strip() and token.type != tokenize.COMMENT:
            lines |= {*range(token.start[0], token.end[0] + 1)}
    documented = ast.Module | ast.FunctionDef | ast.ClassDef
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node):
            lines -= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return len(lines)


def test_the_lines_of_our_examples_are_those_that_the_comparison_names() -> None:
    text = (DOCS / "comparison.md").read_text()
    rows = re.findall(r"^\| \[`(\w+\.py)`\][^|]*\| (\d+) \|", text, re.M)
    shared = re.findall(r"the (\d+) lines of\s`examples/(\w+\.py)`", text)
    named_lines = {**dict(rows), **{name: count for count, name in shared}}
    counted = {name: str(lines_of_code(ROOT / "examples" / name)) for name in named_lines}
    assert len(named_lines) == 6
    assert named_lines == counted


def commands() -> list[str]:
    """The pytest commands of the pages, each once."""
    text = " ".join(" ".join(page.read_text().split()) for page in PAGES)
    return sorted({found.strip() for found in re.findall(r"`pytest ([^`]+)`", text)})


@pytest.mark.long
@pytest.mark.parametrize("command", commands())
def test_every_command_finds_tests(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", *shlex.split(command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-500:]


def test_the_command_that_a_bug_report_asks_for_prints_the_versions(
    capsys: pytest.CaptureFixture[str],
) -> None:
    template = (ROOT / ".github" / "ISSUE_TEMPLATE" / "bug_report.yml").read_text()
    exec(re.findall(r'python -c "(.+)"', template)[0], {})
    printed = capsys.readouterr().out
    assert printed.startswith(functrain.__version__)
    assert f"jax:    {jax.__version__}" in printed
