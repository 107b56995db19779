"""Rules by which leaves are written: one for each leaf, which fits it and reads it back."""

import jax.numpy as jnp
import pytest
import safetensors.numpy

import functrain as ft


def test_an_export_names_the_leaves_that_have_no_rule(tmp_path) -> None:
    state = {"a": jnp.ones(2), "b": {"c": jnp.ones(2)}}
    with pytest.raises(ValueError, match=r"(?s)rename: expected one rule for each leaf.*b/c: none"):
        ft.export.params(tmp_path / "a.safetensors", state, rename=[ft.Rename("a", "a")])
    split = ft.Rename("x", ["a", "missing"])
    with pytest.raises(ValueError, match="missing"):
        ft.export.params(tmp_path / "a.safetensors", state, rename=[split])
    both = [ft.Rename("a", "a"), ft.Rename("x.**", "**")]
    with pytest.raises(ValueError, match=r"(?s)one rule for each leaf.*a: \[Rename.*Rename"):
        ft.export.params(tmp_path / "a.safetensors", state, rename=both)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("leaves", "rule", "got"),
    [
        ({"x": (6, 4)}, ft.Rename(["a", "b"], "x", parts=(4, 3)), r"x: float32\[6, 4\] by"),
        ({"x": (5, 4)}, ft.Rename(["a", "b"], "x"), r"x: float32\[5, 4\] by Rename"),
        ({"x": (4,)}, ft.Rename(["a", "b"], "x", axis=1), r"x: float32\[4\] by Rename"),
        ({"x": (5, 4), "y": (5, 3)}, ft.Rename("a", ["x", "y"]), r"x: .*4\], y: .*3\] by Rename"),
    ],
)
def test_an_export_names_leaves_that_do_not_fit_their_rule(tmp_path, leaves, rule, got) -> None:
    state = {name: jnp.zeros(shape) for name, shape in leaves.items()}
    with pytest.raises(ValueError, match=rf"rename: expected rules that have the axes[^§]*{got}"):
        ft.export.params(tmp_path / "a.safetensors", state, rename=[rule])
    assert not list(tmp_path.iterdir())


def test_an_export_writes_no_array_twice_and_converts_none(tmp_path) -> None:
    ones, path = jnp.ones(4), tmp_path / "a.safetensors"
    both = [ft.Rename(["a", "b"], "x"), ft.Rename(["c", "b"], "y")]
    with pytest.raises(ValueError, match=r"rename: expected names of one array each[^§]*  b"):
        ft.export.params(path, {"x": ones, "y": ones}, rename=both)
    with pytest.raises(ValueError, match="none of them __metadata__"):
        ft.export.params(path, {"__metadata__": ones})
    dtypes = {"x": ones, "y": ones.astype(jnp.bfloat16)}
    with pytest.raises(ValueError, match="join leaves of one dtype"):
        ft.export.params(path, dtypes, rename=[ft.Rename("a", ["x", "y"])])
    tied = [ft.Rename("a", "x"), ft.Rename("a", "y")]
    with pytest.raises(ValueError, match="expected equal leaves for a"):
        ft.export.params(path, dtypes, rename=tied)
    ft.export.params(path, {"x": ones * jnp.nan, "y": ones * jnp.nan}, rename=tied)


def test_stars_take_as_little_as_they_can_and_never_two_meanings(tmp_path) -> None:
    state = {"layers_0_post_attention_norm": jnp.ones(2)}
    rule = ft.Rename("layers.*.*_norm", "layers_*_*_norm")
    ft.export.params(tmp_path / "a.safetensors", state, rename=[rule])
    assert list(safetensors.numpy.load_file(tmp_path / "a.safetensors")) == [
        "layers.0.post_attention_norm"
    ]
    rule = ft.Rename("*_*", "*/*")
    with pytest.raises(ValueError, match="rename: expected a rule that reads a_b/c from a_b_c"):
        ft.export.params(tmp_path / "b.safetensors", {"a_b": {"c": jnp.ones(2)}}, rename=[rule])
