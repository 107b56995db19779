"""`python -m functrain`: the commands that there are."""

import pathlib
import re
import runpy

ROOT = pathlib.Path(__file__).parents[2]


def test_all_commands_are_named(capsys) -> None:
    runpy.run_module("functrain", run_name="__main__")
    named = re.findall(r"python -m (\S+)", capsys.readouterr().out)
    sources = (ROOT / "functrain").rglob("*.py")
    runnable = [path for path in sources if 'if __name__ == "__main__"' in path.read_text()]
    modules = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in runnable)
    assert {*named, "functrain"} == {name.removesuffix(".__main__") for name in modules}
