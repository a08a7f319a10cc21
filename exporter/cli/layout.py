"""Aligned text: as wide as the terminal, or one line per row if the output is piped.

Nothing from a cluster or an exporter is treated as markup, and control characters become escapes:
no name can move the cursor or change colours.
"""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TextIO, TypeAlias

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from exporter.text import escape


Cell: TypeAlias = str | tuple[str, str]
"""Text, or text and its style."""

NARROWEST = 40
"""Fewer columns leave no space to align anything."""
GOOD, BAD, FAINT = "green", "bold red", "dim"

_UNLIMITED = 1_000_000


@dataclass(frozen=True)
class Screen:
    """Where text is shown: `width` columns, or None if lines may have any length."""

    width: int | None = None
    colored: bool = False


def detect_terminal(stream: TextIO | None, environment: Mapping[str, str]) -> Screen:
    """The terminal behind a stream; COLUMNS and NO_COLOR take precedence over it."""
    if stream is None or not stream.isatty():
        return Screen()
    columns = environment.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else 0
    if not width:
        try:
            width = os.get_terminal_size(stream.fileno()).columns
        except OSError:
            width = 0
    plain = environment.get("NO_COLOR") or environment.get("TERM", "dumb") == "dumb"
    return Screen(width=max(width or 80, NARROWEST), colored=not plain)


class Sheet:
    """Text put together line by line for one screen."""

    def __init__(self, screen: Screen) -> None:
        self._file = StringIO()
        self._console = Console(
            file=self._file,
            width=screen.width or _UNLIMITED,
            force_terminal=screen.colored,
            color_system="standard" if screen.colored else None,
            no_color=not screen.colored,
            markup=False,
            emoji=False,
            highlight=False,
            legacy_windows=False,
        )

    def text(self) -> str:
        """Everything so far, without trailing blanks."""
        return re.sub(r" +$", "", self._file.getvalue(), flags=re.MULTILINE)

    def say(self, *cells: Cell) -> None:
        """Add a sentence."""
        self._console.print(Text.assemble(*(_draw(cell) for cell in cells)))

    def warn(self, sentences: Iterable[str]) -> None:
        """Add a warning per sentence."""
        for sentence in sentences:
            self.say(("Warning: ", BAD), sentence)

    def head(self, text: str) -> None:
        """Add a heading."""
        self._console.print()
        self.say((text, "bold"))

    def rows(self, rows: Sequence[Sequence[Cell]], head: Sequence[str] = ()) -> None:
        """Add aligned columns; a cell that is too long wraps within its column."""
        if not rows:
            return
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in rows[0]:
            table.add_column(overflow="fold")
        if head:
            table.add_row(*(_draw((name, FAINT)) for name in head))
        for row in rows:
            table.add_row(*(_draw(cell) for cell in row))
        self._console.print(Padding.indent(table, 2))

    def note_hidden(self, total: int, limit: int | None) -> None:
        """Say how many rows are not shown."""
        if limit is not None and total > limit:
            self.rows([((f"and {total - limit} more: --all shows them", FAINT),)])

    def command(self, command: str) -> None:
        """Add a command on one line, however long, so that it can be copied."""
        self._console.print(Text(f"    {escape(command)}"), soft_wrap=True)


def _draw(cell: Cell) -> Text:
    text, style = (cell, "") if isinstance(cell, str) else cell
    return Text(escape(text), style)
