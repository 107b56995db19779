"""A notebook, executed as Jupyter does, and saved. `make test-adapters` has nbclient."""

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytestmark = [pytest.mark.adapters, pytest.mark.filterwarnings("ignore")]  # Jupyter's own

FIT = """
import jax.numpy as jnp, numpy as np, optax, functrain as ft
def loss_fn(params, model_state, batch, *, rng, training):
    return jnp.mean((batch - params["w"]) ** 2), ft.Aux(model_state)
tx = optax.sgd(0.1)
data = ft.ArrayLoader(np.ones(30, np.float32), 2)
result = ft.fit(
    ft.TrainState.create(params={"w": jnp.zeros(())}, tx=tx), ft.train_step(loss_fn, tx), data,
    epochs=2, eval_data=data, eval_step=ft.eval_step(loss_fn),
)
"""


@pytest.fixture(scope="module")
def outputs():
    cells = [FIT, "result", "result.history", "result.history.plot()"]
    cells.append("import matplotlib.pyplot as plt\nresult.history.plot()")
    book = nbformat.v4.new_notebook(cells=list(map(nbformat.v4.new_code_cell, cells)))
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()
    return [cell.outputs for cell in book.cells]


def test_the_saved_bar_is_finished(outputs) -> None:
    shown = [output["data"]["text/html"] for output in outputs[0] if "data" in output]
    assert len(shown) == 2
    for i, html in enumerate(shown):
        assert f"epoch {i + 1}/2" in html
        assert "15/15" in html
        assert "val_loss" in html


def test_results_are_a_line_and_histories_a_table_with_a_picture(outputs) -> None:
    (result,), (history,) = outputs[1:3]
    assert result["data"]["text/plain"].startswith("FitResult(state=TrainState(step=30, ")
    assert "<table" in history["data"]["text/html"]
    assert "image/png;base64" in history["data"]["text/html"]


@pytest.mark.parametrize("cell", [3, 4])
def test_a_plot_is_one_picture_with_pyplot_and_without(outputs, cell) -> None:
    (only,) = outputs[cell]
    assert "image/png" in only["data"]
