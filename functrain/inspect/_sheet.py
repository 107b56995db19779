"""Tables as plain text."""

from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.table import Table

from functrain.common import _table


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
    return _table.render(table)
