"""The README's code runs as it stands, from top to bottom."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_first_block_is_short() -> None:
    assert len(BLOCKS[0].strip().splitlines()) <= 15


@pytest.mark.smoke
def test_every_block_runs(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for i, block in enumerate(BLOCKS):
        exec(compile(block, "README.md", "exec"), names)
        if i == 0:
            assert names["history"].epochs["accuracy"][-1] > 0.95
    assert (tmp_path / "mnist.keras").exists()
    assert names["history"].history["accuracy"][-1] > 0.95
