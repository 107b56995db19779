import numpy as np
import pytest

import functrain as ft


def history(**parts):
    return ft.History(
        **{
            "steps": {"loss": np.arange(8.0), "learning_rate": np.ones(8)},
            "epochs": {"loss": np.array([1.5, 5.5]), "seconds": np.ones(2)},
            "within_epochs": {
                "val_loss": (np.array([2, 6]), np.array([2.5, 6.5])),
                "norm": (np.array([3]), np.array([0.5])),
            },
            **parts,
        }
    )


def lines(panel):
    return {line.get_label(): line.get_xydata().tolist() for line in panel.get_lines()}


def test_values_within_epochs_are_drawn_at_their_steps() -> None:
    loss, rate, norm = history().plot().axes
    assert [panel.get_title() for panel in (loss, rate, norm)] == ["loss", "learning rate", "norm"]
    assert lines(loss)["validation, within epochs"] == [[2, 2.5], [6, 6.5]]
    assert lines(loss)["training"] == [[4, 1.5], [8, 5.5]]
    assert lines(norm) == {"training, within epochs": [[3, 0.5]]}


def test_values_of_epochs_are_drawn_at_their_ends_although_the_last_one_is_unfinished() -> None:
    @ft.at(10)
    def stop(event):
        event.stop()

    data = ft.ArrayLoader(np.zeros(8, np.float32), 2)  # four steps an epoch
    found = ft.fit(0.0, lambda x, _: (x + 1, {"loss": x}), data, epochs=3, hooks=[stop], verbose=0)
    assert found.history.epoch_ends.tolist() == [4, 8]
    assert lines(found.history.plot().axes[0])["training"] == [[4, 1.5], [8, 5.5]]


def test_an_evaluation_of_what_training_does_not_report_has_a_panel() -> None:
    (panel,) = (
        history(steps={}, epochs={"val_f1": np.array([0.5, 0.6])}, within_epochs={}).plot().axes
    )
    assert panel.get_xlabel() == "epoch"
    assert lines(panel) == {"validation": [[1, 0.5], [2, 0.6]]}


def test_a_fit_that_went_on_is_drawn_where_it_was() -> None:
    later = history(first_step=100, within_epochs={"val_loss": (np.array([102]), np.array([2.5]))})
    found = lines(later.plot().axes[0])
    assert found["each step"][0][0] == 101
    assert found["training"] == [[104, 1.5], [108, 5.5]]
    assert found["validation, within epochs"] == [[102, 2.5]]


def test_a_history_is_shown_by_its_names() -> None:
    assert repr(history()) == (
        "History(8 steps: loss, learning_rate; 2 epochs: loss, seconds; "
        "within epochs: val_loss, norm)"
    )
    assert repr(ft.History({}, {})) == "History()"


def test_the_word_of_keras_is_told_what_it_is_here() -> None:
    message = r'functrain History has no .*history\.epochs\["loss"\] .*history\.steps\["loss"\]'
    with pytest.raises(AttributeError, match=message):
        _ = history().history
    result = ft.FitResult(state=(), history=history())
    with pytest.raises(AttributeError, match=message):
        _ = result.history.history["loss"]
    assert not hasattr(history(), "history")
