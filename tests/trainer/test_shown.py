"""What a terminal and a notebook show of a fit: the bar, the history, objects in a line."""

import base64
import io
import pathlib
import re
import sys
import types

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image
from rich.console import Console

import functrain as ft
from functrain.trainer._bar import Bar
from functrain.trainer._progress import ProgressReport
from functrain.trainer._recorder import Recorder

VALUES = {"loss": 0.123456, "accuracy": 0.98765, "learning_rate": 1e-3, "val_accuracy": 0.9}


def run(console):
    """A report of two epochs of 30 steps, of which the bar is too late to be told the last."""
    position, recorder = ft.Position(), Recorder()
    with ProgressReport(2, 30, "auto", console=console) as progress:
        for epoch in range(2):
            for _ in range(3):
                position = position.after(10)
                progress(
                    ft.events.ChunkEnd(position=position, state=(), steps=10, examples=8, rows={}),
                    recorder,
                )
            progress(ft.events.EpochEnd(position=position, state=(), values=VALUES), recorder)
            position = ft.Position(position.step, epoch + 1)


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_bar_of_an_epoch_becomes_lines_with_all_values_in_any_width(width) -> None:
    stream = io.StringIO()
    run(Console(file=stream, force_terminal=True, width=width, color_system=None))
    lines = [re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", line) for line in stream.getvalue().split("\n")]
    drawn = [i for i, line in enumerate(lines) if "epoch 1/2  30 steps" in line][-1]
    last = [i for i, line in enumerate(lines) if "epoch 2/2" in line]
    finished = lines[drawn : last[0]]
    for expected in ("loss 0.1235", "accuracy 0.9877", "learning_rate 0.001", "val_accuracy 0.9"):
        assert any(expected in line for line in finished), finished
    assert len(finished) == {60: 3, 80: 2, 160: 1}[width]
    assert "…" not in stream.getvalue()
    assert all(len(line.split("\r")[-1]) <= width for line in lines)


@pytest.mark.parametrize(("width", "count"), [(60, 5), (80, 3), (120, 2), (240, 1)])
def test_values_that_do_not_fit_beside_a_bar_are_whole_below_it(width: int, count: int) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=width, color_system=None)
    values = ["12,345 examples/s", "loss 0.5123", "accuracy 0.9123", "gradient_norm 1.234"]
    values += ["skipped 0", "skipped_in_a_row 0", "top_5_accuracy 0.9911", "learning_rate 0.001"]
    bar = Bar(console, "epoch 3/10", 30000, 1234)
    stream.truncate(0)
    bar.update(values="  ".join(values))
    bar.stop()
    last = stream.getvalue().split("\x1b[2K")[-1]
    lines = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", last).strip().split("\n")
    assert len(lines) == count
    assert all(any(value in line for line in lines) for value in values)
    assert all(len(line) <= width for line in lines)


def test_a_training_without_epochs_shows_its_steps(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps in (6, 10):
        saves = ft.Checkpointer(tmp_path)
        how = {"steps": steps, "checkpointer": saves, "fuse": 2}
        ft.fit(0.0, step, [jnp.ones(2)] * 3, verbose="lines", **how)
    ended, resumed, went_on = capsys.readouterr().out.splitlines()
    assert ended.startswith("training  6 steps  ")
    assert resumed == f"resuming after 6 steps: {tmp_path}"
    assert went_on.startswith("training  10 steps  ")


def test_the_bar_of_a_training_without_epochs_counts_all_of_its_steps() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, color_system=None)
    start = ft.Position(step=6, epoch=1)
    with ProgressReport(2, 4, "bar", start, console, total_steps=10):
        pass
    assert "training" in stream.getvalue()
    assert re.findall(r"(\d+/\d+)", stream.getvalue())[-1] == "6/10"


def test_a_run_that_ends_early_leaves_the_bar_where_it_was() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80, color_system=None)
    with ProgressReport(1, 30, console=console) as progress:
        for step in (7, 17):
            end = ft.events.ChunkEnd(
                position=ft.Position(step), state=(), steps=7, examples=1, rows={}
            )
            progress(end, Recorder())
    assert re.findall(r"(\d+)/30", stream.getvalue())[-1] == "14"


class Cell:
    """What IPython.display does for the bar: keeps what a cell shows in the end."""

    def __init__(self):
        self.shown = []

    def display(self, thing, *, display_id):
        assert display_id
        self.shown.append(self.text(thing))
        place = len(self.shown) - 1
        return types.SimpleNamespace(
            update=lambda new: self.shown.__setitem__(place, self.text(new))
        )

    @staticmethod
    def text(thing):
        return thing._repr_html_()


def test_a_notebook_s_cell_keeps_the_finished_bar(monkeypatch) -> None:
    cell = Cell()
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", cell)
    run(Console(force_jupyter=True))
    assert len(cell.shown) == 2
    for i, html in enumerate(cell.shown):
        # Each span has room for its text in one line; the line breaks between them.
        spans = re.findall('<span style="white-space:nowrap">(.*?)</span>', html)
        texts = [re.sub("<[^>]*>", "", span).strip() for span in spans]
        assert texts[:2] == [f"epoch {i + 1}/2", "30/30"]
        assert {"loss 0.1235", "accuracy 0.9877", "val_accuracy 0.9"} <= set(texts)
        assert "flex-wrap:wrap" in html
        assert '<progress value="30" max="30"' in html


def history(epochs=2):
    return ft.History(
        steps={"loss": np.arange(8.0)},
        epochs={"loss": np.arange(epochs) + 0.5, "val_<b>": np.full(epochs, np.nan)},
        within_epochs={"val_loss": (np.array([2, 6]), np.array([2.5, 6.5]))},
    )


def rows(html):
    return [re.findall("<t[dh]>(.*?)</t[dh]>", row) for row in re.findall("<tr>(.*?)</tr>", html)]


def test_a_history_is_a_table_and_a_picture_in_a_notebook() -> None:
    html = history()._repr_html_()
    assert rows(html) == [
        ["epoch", "loss", "val_&lt;b&gt;"],
        ["1", "0.5", "nan"],
        ["2", "1.5", "nan"],
    ]
    (data,) = re.findall('src="data:image/png;base64,([^"]+)"', html)
    assert Image.open(io.BytesIO(base64.b64decode(data))).width > 400


def test_estimates_are_tables_in_a_notebook() -> None:
    text = pytest.importorskip("IPython.lib.pretty").pretty
    batch = jnp.ones((8, 300))
    for estimate in (ft.inspect.memory, ft.inspect.cost):
        made = estimate(STATE, step, batch)
        assert text(made) == str(made) != repr(made)


def test_of_many_epochs_the_first_and_the_last_are_shown() -> None:
    first = [row[0] for row in rows(history(epochs=200)._repr_html_())]
    assert first == ["epoch", "1", "2", "3", "...", *map(str, range(189, 201))]


def test_without_matplotlib_there_is_the_table(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    html = history()._repr_html_()
    assert len(rows(html)) == 3
    assert "<img" not in html


def test_the_lists_of_a_keras_history_are_plotted_in_panels_of_one_range() -> None:
    keras_history = {"loss": [3.0, 2.0], "val_loss": [3.5, 2.5], "accuracy": [0.5, 0.75]}
    loss, accuracy = ft.History({}, keras_history).plot().axes
    assert [list(line.get_ydata()) for line in loss.lines] == [[3.0, 2.0], [3.5, 2.5]]
    assert loss.get_xlim() == accuracy.get_xlim()


def test_a_plot_of_many_quantities_has_rows_of_three() -> None:
    epochs = {name: np.ones(2) for name in ("loss", "mae", "mse", "accuracy", "gradient_norm")}
    figure = ft.History(steps={}, epochs=epochs).plot()
    assert [axes.get_title() for axes in figure.axes] == [n.replace("_", " ") for n in epochs]
    assert figure.get_size_inches().tolist() == [3 * 5.2, 2 * 3.6]


TX = optax.sgd(0.1)
STATE = ft.TrainState.create(params={"w": jnp.ones((300, 400))}, tx=TX)


def step(state, batch):
    return state, {"loss": jnp.sum(batch)}


@pytest.mark.parametrize(
    ("thing", "shown"),
    [
        (ft.fuse(step, 8), "Fused(step, k=8)"),
        (ft.run(STATE, step, [np.ones(2)]), "Run(Position(step=0, epoch=0, batch=0))"),
        (
            ft.FitResult({"w": jnp.ones((300, 400))}, ft.History({}, {})),
            "FitResult(state=120,000 in 1 array, history=History())",
        ),
        (
            ft.FitResult(STATE, ft.History({}, {})),
            "FitResult(state=TrainState(step=0, params=120,000 in 1 array, model_state=(), "
            "opt_state=(EmptyState(), EmptyState()), rng=None), history=History())",
        ),
    ],
    ids=lambda value: value[:11] if isinstance(value, str) else "",
)
def test_things_are_shown_in_a_line(thing, shown) -> None:
    assert repr(thing) == shown
