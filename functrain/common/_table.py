"""Tables as text."""

import io

from rich.console import Console
from rich.table import Table


def render(table: Table, width: int = 100_000) -> str:
    """Returns a rich table as plain text of at most `width` columns, whatever the terminal."""
    # Markup is off since cells may hold brackets, and Jupyter mode since rich would display the
    # table in the notebook instead of returning it.
    console = Console(
        file=io.StringIO(),
        width=width,
        markup=False,
        emoji=False,
        highlight=False,
        color_system=None,
        force_terminal=False,
        force_jupyter=False,
    )
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())
