"""Tables of bytes in plain text."""

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table

from functrain.common import _table


def sheet(
    texts: Sequence[str], numbers: Sequence[str], sections: Iterable[Iterable[Sequence[str]]]
) -> str:
    """Returns a table, never cut to the width of a terminal.

    Args:
      texts: Names of the columns on the left.
      numbers: Those of the columns behind them.
      sections: Rows, with a line between two sections.
    """
    table = Table(box=box.ASCII2)
    for name in texts:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for rows in sections:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return _table.text(table)
