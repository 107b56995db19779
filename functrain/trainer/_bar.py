"""A progress bar in a terminal or in a cell of a notebook."""

import html
from collections.abc import Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text


def fill_lines(texts: Sequence[str], width: int, indent: int) -> list[str]:
    """Returns texts in lines of a width, which break between two texts, and not within a text.

    Examples:
      >>> fill_lines(["epoch 1/2", "loss 0.5", "accuracy 0.9"], width=24, indent=4)
      ['epoch 1/2  loss 0.5', '    accuracy 0.9']
    """
    first, *others = texts
    lines = [first]
    for text in others:
        longer = f"{lines[-1]}  {text}"
        if cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(" " * indent + text)
    return lines


class _BarWithValues(Progress):
    """A bar with values beside it; those that do not fit into its line are below it."""

    def get_renderables(self) -> Iterator[RenderableType]:
        """Yields the line of the bar, and the lines below it."""
        # rich asks for them when there is no task yet, too.
        for task in self.tasks:
            bar, values = self.make_tasks_table([task]), task.fields["values"].split("  ")
            bar_width, indent = self.console.measure(bar).maximum, cell_len(task.description) + 2
            # The spaces stand for the bar, which is not a text.
            first, *others = fill_lines([" " * bar_width, *values], self.console.width, indent)
            line = Table.grid(padding=(0, 2))
            line.add_row(bar, Text(first.lstrip(" "), no_wrap=True))
            yield line
            yield from map(Text, others)


class Bar:
    """A progress bar with values beside it.

    Args:
      console: The console to show it in. In a notebook, the bar is displayed in a cell instead.
      title: Text in front of the bar.
      total: The total number of steps, if known.
      completed: The number of steps taken.
    """

    def __init__(self, console: Console, title: str, total: int | None, completed: int) -> None:
        no_wrap = Column(no_wrap=True)
        self._counts = (
            MofNCompleteColumn(table_column=no_wrap),
            TimeRemainingColumn(elapsed_when_finished=True, table_column=no_wrap),
        )
        self._progress = _BarWithValues(
            TextColumn("{task.description}", markup=False, table_column=no_wrap),
            BarColumn(bar_width=12, table_column=no_wrap),
            *self._counts,
            console=console,
            refresh_per_second=5,
        )
        self._task = self._progress.add_task(title, total=total, completed=completed, values="")
        self._notebook_display: Any = None
        if console.is_jupyter:
            # rich's own display in notebooks needs ipywidgets and omits the last refresh. Its
            # tables are as wide as a terminal, so a page would cut them off.
            from IPython.display import display

            self._notebook_display = display(self, display_id=True)
        else:
            self._progress.start()

    def update(self, **fields: Any) -> None:
        """Updates fields of the bar.

        Args:
          **fields: `completed` and `total`, in steps, and `values`, such as ``loss 0.5  mae 0.1``.
        """
        self._progress.update(self._task, **fields)
        if self._notebook_display is not None:
            self._notebook_display.update(self)

    def stop(self) -> None:
        """Stops refreshing; the bar stays on the screen."""
        if self._notebook_display is None:
            self._progress.stop()

    def remove(self) -> bool:
        """Stops refreshing, and returns True if the bar was removed: in a notebook it stays."""
        is_removed = self._notebook_display is None
        self._progress.live.transient = is_removed
        self.stop()
        return is_removed

    def _texts(self) -> list[str]:
        """Returns the texts of the line, without the bar."""
        (task,) = self._progress.tasks
        counts = [column.render(task).plain for column in self._counts]
        return [task.description, *counts, *task.fields["values"].split("  ")]

    def __repr__(self) -> str:
        return "  ".join(self._texts())

    def _repr_html_(self) -> str:
        (task,) = self._progress.tasks
        # Without a value, the browser shows that the end is unknown.
        value = "" if task.total is None else f'value="{task.completed}" max="{task.total}"'
        title, *texts = map(html.escape, self._texts())
        bar = f'{title} <progress {value} style="width:7em"></progress>'
        # Lines break between two texts, and not within a text.
        spans = map('<span style="white-space:nowrap">{}</span>'.format, (bar, *texts))
        style = "display:flex;flex-wrap:wrap;align-items:center;gap:0 1.2em;font-family:monospace"
        return f'<div style="{style}">{"".join(spans)}</div>'
