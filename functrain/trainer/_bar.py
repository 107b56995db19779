"""A progress bar: a line that is drawn anew, in a terminal or in a cell of a notebook."""

from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table


class Bar:
    """A bar with its values beside it, which wrap where they do not fit: nothing is cut.

    Args:
      console: Where it is shown.
      title: In front of it.
      total: Steps in all, if known.
      completed: Steps taken.
    """

    def __init__(self, console: Console, title: str, total: int | None, completed: int) -> None:
        whole = [Column(no_wrap=True) for _ in range(4)]
        self._progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=whole[0]),
            BarColumn(bar_width=12, table_column=whole[1]),
            MofNCompleteColumn(table_column=whole[2]),
            TimeRemainingColumn(elapsed_when_finished=True, table_column=whole[3]),
            TextColumn("{task.fields[values]}", markup=False, table_column=Column(overflow="fold")),
            console=console,
            refresh_per_second=5,
        )
        self._task = self._progress.add_task(title, total=total, completed=completed, values="")
        self._cell: Any = None
        if console.is_jupyter:
            # rich's own way there needs ipywidgets, and leaves the last refresh out.
            from IPython.display import display

            self._cell = display(self._table(), display_id=True)
        else:
            self._progress.start()

    def update(self, **fields: Any) -> None:
        """Shows other numbers."""
        self._progress.update(self._task, **fields)
        if self._cell is not None:
            self._cell.update(self._table())

    def _table(self) -> Table:
        return self._progress.make_tasks_table(self._progress.tasks)

    def stop(self) -> None:
        """Leaves it on the screen as it is."""
        if self._cell is None:
            self._progress.stop()
