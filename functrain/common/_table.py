"""Tables as text."""

import io

from rich.console import Console
from rich.table import Table


def text(table: Table) -> str:
    """Returns a rich table as plain text, never cut to the width of a terminal."""
    # Cells may hold brackets, which are markup to rich, and notebooks have a console of their own.
    console = Console(
        file=io.StringIO(),
        width=100_000,  # no terminal's: nothing is cut
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
