"""Tables as text."""

import io
from collections.abc import Collection, Iterable, Sequence

from rich import box
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
        color_system=None,
        force_jupyter=False,
    )
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().strip("\n").splitlines())


def sheet(
    columns: Sequence[str], *sections: Iterable[Sequence[str]], numbers: Collection[str] = ()
) -> str:
    """Returns a table in ASCII, never cut to the width of a terminal.

    Args:
      columns: The headers of the columns.
      *sections: Rows, with a line between two sections.
      numbers: The headers of the columns to align on the right.
    """
    table = Table(box=box.ASCII2)
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
    for rows in sections:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return render(table)
