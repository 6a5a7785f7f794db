"""Shows a model fetch on a terminal; without one it writes a line per stage."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars


class RichProgress:
    """A `Progress` for `engine.models.fetch`; use it as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
            self._bars = Bars(*columns, console=self._console)

    def __enter__(self) -> RichProgress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bars is not None:
            if kind is None:
                self._finish_stage()
            self._bars.stop()

    def stage(self, text: str, total_bytes: int | None = None) -> None:
        """A new line with a bar; a moving one when the length is not known."""
        if self._bars is None:
            self._console.print(text, highlight=False)
            return
        self._finish_stage()
        self._task = self._bars.add_task(text, total=total_bytes)

    def advance(self, done_bytes: int) -> None:
        """Move the present bar."""
        if self._bars is not None and self._task is not None:
            self._bars.update(self._task, completed=done_bytes)

    def note(self, text: str) -> None:
        """A line above the bars."""
        self._console.print(text, style="yellow", highlight=False)

    def _finish_stage(self) -> None:
        if self._bars is not None and self._task is not None:
            task = self._bars.tasks[self._task]
            self._bars.update(self._task, total=task.total or 1, completed=task.total or 1)
