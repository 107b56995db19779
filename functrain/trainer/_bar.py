"""A progress bar in a terminal or in a cell of a notebook."""

import html
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text


class Bar:
    """A progress bar with values beside it; long lines break between two values.

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
        self._progress = Progress(
            TextColumn("{task.description}", markup=False, table_column=no_wrap),
            BarColumn(bar_width=12, table_column=no_wrap),
            *self._counts,
            _ValuesColumn(),
            console=console,
            refresh_per_second=5,
        )
        self._task = self._progress.add_task(title, total=total, completed=completed, values=())
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
          **fields: `completed` and `total`, in steps, and `values`, texts such as ``loss 0.5``.
        """
        self._progress.update(self._task, **fields)
        if self._notebook_display is not None:
            self._notebook_display.update(self)

    def stop(self) -> None:
        """Stops refreshing; the bar stays on the screen."""
        if self._notebook_display is None:
            self._progress.stop()

    def _texts(self) -> list[str]:
        """Returns the texts of the line, without the bar."""
        (task,) = self._progress.tasks
        counts = [column.render(task).plain for column in self._counts]
        return [task.description, *counts, *task.fields["values"]]

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


class _ValuesColumn(ProgressColumn):
    """The column of the values."""

    def render(self, task: Task) -> "_WrappedTexts":
        """Returns the values of a task."""
        return _WrappedTexts(task.fields["values"])


class _WrappedTexts:
    """Texts in one or more lines, broken between texts: rich would break at any space."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max(map(len, self._texts), default=0)
        return Measurement(longest, len("  ".join(self._texts))).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        # textwrap does not break lines at a no-break space.
        text = "  ".join(text.replace(" ", "\N{NO-BREAK SPACE}") for text in self._texts)
        width = max(1, options.max_width)
        lines = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        yield Text("\n".join(lines).replace("\N{NO-BREAK SPACE}", " "), overflow="fold")
