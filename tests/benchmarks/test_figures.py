"""The figures of the pages are those of the measured results."""

import json
import shutil

import pytest

from benchmarks import chart, figures
from benchmarks.report import cell


def test_the_chart_of_the_front_page_is_that_of_the_results() -> None:
    assert chart.CHART.read_text() == chart.drawn(chart.panels())


def test_the_figures_of_the_pages_are_those_of_the_results() -> None:
    assert figures.findings() == []


@pytest.fixture
def remeasured(tmp_path, monkeypatch):
    """Copies of the pages, and results in which bridge.fit takes twice as long."""
    for page in figures.PAGES:
        (tmp_path / page).parent.mkdir(exist_ok=True)
        shutil.copy(figures.ROOT / page, tmp_path / page)
    (tmp_path / "results").mkdir()
    for path in figures.RESULTS.glob("results*.json"):
        results = json.loads(path.read_text())
        for result in results["results"]:
            for name, way in result["ways"].items():
                if name.startswith("bridge-fit"):
                    way["median"] *= 2
                    way["seconds"] = [2 * seconds for seconds in way["seconds"]]
        (tmp_path / "results" / path.name).write_text(json.dumps(results))
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    monkeypatch.setattr(figures, "RESULTS", tmp_path / "results")
    return tmp_path


def test_new_results_change_rows_and_sentences(remeasured) -> None:
    found = {(page, new) for page, _, new in figures.findings()}
    ways = figures.by_workload(figures.load("results.json"))
    milliseconds = 1e3 * ways["mnist-convnet"]["bridge-fit"]["median"]
    convnet = f"small MNIST convnet takes {milliseconds:.1f} ms in `bridge.fit`"
    assert any(page == "README.md" and convnet in " ".join(new.split()) for page, new in found)
    residual = cell(ways["residual"], "bridge-fit")
    assert any(new.startswith("| residual (64) |") and residual in new for _, new in found)
    assert figures.main(["--write"]) == 0
    assert figures.findings() == []
    assert convnet in " ".join((remeasured / "README.md").read_text().split())


def test_a_missing_sentence_row_or_date_is_left_to_the_author(remeasured) -> None:
    figures.main(["--write"])
    page = remeasured / "README.md"
    page.write_text(page.read_text().replace("MNIST convnet", "net"))
    page = remeasured / "docs/performance.md"
    page.write_text(page.read_text().replace("| vit (32) |", "| vitt (32) |", 1))
    path = remeasured / "results/results-predict.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"date": "2026-12-01"}))
    by_hand = [" ".join(old.split()) for _, old, new in figures.findings() if new is None]
    assert by_hand[0].startswith("| vitt (32) |")
    assert by_hand[1] == "1 December 2026 (not found above the table of results-predict.json)"
    assert by_hand[2].endswith("(not found)")
    assert len(by_hand) == 3
    assert figures.main(["--write"]) == 1


def test_the_numbers_of_a_table_are_those_of_the_printed_tables(remeasured) -> None:
    rows = [["population, fused", "12.4", "0.71"], ["Keras fit in a loop", "2,012", "12.70"]]
    tables = {"date": "2026-11-24", "tables": [{"title": "", "columns": [], "rows": rows}]}
    (remeasured / "results/population.json").write_text(json.dumps(tables))
    text = "\n# Populations\n\n24 November 2026\n\n<!-- figures: population.json -->\n"
    text += "| Members | fused | fit |\n|---|---:|---:|\n| 32 MLPs | 12.4 (0.71) | 2,012 |\n"
    assert list(figures.rows("page.md", text)) == []
    (finding,) = figures.rows("page.md", text.replace("2,012", "2,013"))
    assert finding.old == "| 32 MLPs | 12.4 (0.71) | 2,013 |"
