import matplotlib.figure
import numpy as np
import PIL.Image
import pytest

import functrain as ft

from .fits import fit


def made(x):
    hook = ft.hooks.Sample(lambda state: x)
    event = ft.events.EpochEnd(position=ft.Position(step=1), state=())
    hook(event)
    return event.samples["sample"]


def test_pictures_are_written_on_a_schedule_and_read_by_pillow(tmp_path) -> None:
    def make(state):
        grey = np.full((2, 2), int(state.step) / 100)
        return {"grey": grey, "red.1": np.uint8([[[200, 0, 1]]]), "words": "grün"}

    hook = ft.hooks.Sample(make, every=ft.every(steps=25), directory=tmp_path / "made")
    fit(hook)
    assert {path.name for path in (tmp_path / "made").iterdir()} == {
        *("grey-00000025.png", "grey-00000050.png", "red.1-00000025.png", "red.1-00000050.png"),
        *("words-00000025.txt", "words-00000050.txt"),
    }
    with PIL.Image.open(tmp_path / "made" / "grey-00000050.png") as picture:
        np.testing.assert_array_equal(np.asarray(picture), np.full((2, 2), 128, np.uint8))
    with PIL.Image.open(tmp_path / "made" / "red.1-00000025.png") as picture:
        assert picture.getpixel((0, 0)) == (200, 0, 1)
    assert (tmp_path / "made" / "words-00000050.txt").read_text(encoding="utf-8") == "grün"


def test_a_name_with_a_slash_is_a_file_in_a_folder(tmp_path) -> None:
    hook = ft.hooks.Sample(lambda state: {"train/words": "a"}, directory=tmp_path)
    hook(ft.events.EpochEnd(position=ft.Position(step=1), state=()))
    assert (tmp_path / "train" / "words-00000001.txt").read_text() == "a"


def test_it_sees_the_state_of_its_step() -> None:
    seen = []
    hook = ft.hooks.Sample(lambda state: seen.append(int(state.step)) or "", every=ft.at(5, 33))
    fit(hook)
    assert seen == [5, 33]


def test_several_pictures_are_laid_out_row_by_row() -> None:
    five = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 1, 3), np.uint8)
    sheet = made(five)
    assert sheet.shape == (4, 3, 3)
    np.testing.assert_array_equal(sheet[::2, :, 0], [[0, 1, 2], [3, 4, 0]])


def test_floats_out_of_range_are_the_darkest_and_the_lightest() -> None:
    found = made(np.array([[-1.0, 0.5, 2.0, np.nan]], np.float32))
    assert found[0, :, 0].tolist() == [0, 128, 255, 0]


def test_a_figure_of_matplotlib_is_a_picture() -> None:
    figure = matplotlib.figure.Figure(figsize=(2, 1), dpi=50, facecolor="red")
    picture = made(figure)
    assert picture.shape == (50, 100, 4)
    assert picture[0, 0].tolist() == [255, 0, 0, 255]


@pytest.mark.parametrize(
    "wrong",
    [None, np.zeros((2, 3, 5)), np.zeros(4), ["a"], np.full((2, 2), 255), np.zeros((0, 2, 2, 3))],
    ids=str,
)
def test_what_is_no_picture_is_refused_by_name(wrong) -> None:
    with pytest.raises(TypeError, match=r"make: expected a text, .* for 'sample'"):
        made(wrong)
