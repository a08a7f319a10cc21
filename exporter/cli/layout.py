"""Aligned text: as wide as the terminal, or one line per row if the output is piped.

Text from a cluster or an exporter is never markup, and its control characters become escapes. So no
name can move the cursor or change colours.
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
"""The least width: with fewer columns nothing can be aligned."""
INDENT, GAP = 2, 2
"""Columns before a table and between its columns."""
ROWS = 20
"""The rows of a table that are shown without --all."""
GOOD, BAD, FAINT = "green", "bold red", "dim"

_UNLIMITED = 1_000_000


@dataclass(frozen=True)
class Screen:
    """Where text is shown: `width` columns, or None if lines may have any length.

    A table shows its first `rows` rows, or all if that is None.
    """

    width: int | None = None
    colored: bool = False
    rows: int | None = ROWS


def detect_terminal(stream: TextIO | None, environment: Mapping[str, str]) -> Screen:
    """The terminal behind a stream; COLUMNS and NO_COLOR take precedence over it."""
    if stream is None or not stream.isatty():
        return Screen()
    columns = environment.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() else 0
    width = width or os.get_terminal_size(stream.fileno()).columns
    plain = environment.get("NO_COLOR") or environment.get("TERM", "dumb") == "dumb"
    return Screen(width=max(width or 80, NARROWEST), colored=not plain)


class Sheet:
    """Text for one screen, to which lines are added."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
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
        """Add one warning for each sentence."""
        for sentence in sentences:
            self.say(("Warning: ", BAD), sentence)

    def head(self, text: str) -> None:
        """Add a heading."""
        self._console.print()
        self.say((text, "bold"))

    def rows(self, rows: Sequence[Sequence[Cell]], head: Sequence[str] = ()) -> None:
        """Add aligned columns; a cell that is too long wraps within its column.

        No word is broken: if the columns do not fit beside each other, the first cell of each row
        gets a line of its own.
        """
        if not rows:
            return
        drawn = [[_draw(cell) for cell in row] for row in rows]
        if head:
            drawn.insert(0, [_draw((name, FAINT)) for name in head])
        room = self._console.width - INDENT
        widths = _share_width(drawn, room)
        if widths or len(drawn[0]) == 1:
            self._print_grid(drawn, widths, INDENT)
            return
        widths = _share_width([others for _, *others in drawn], room - INDENT)
        for first, *others in drawn:
            self._console.print(Padding.indent(first, INDENT))
            self._print_grid([others], widths, 2 * INDENT)

    def _print_grid(
        self, rows: Sequence[Sequence[Text]], widths: Sequence[int], indent: int
    ) -> None:
        """Print columns of these widths; without `widths`, as wide as their content needs."""
        table = Table.grid(padding=(0, GAP, 0, 0))
        for number in range(len(rows[0])):
            table.add_column(overflow="fold", width=widths[number] if widths else None)
        for row in rows:
            table.add_row(*row)
        self._console.print(Padding.indent(table, indent))

    def table(self, head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Add a table, and a line that says how many rows are not shown."""
        shown = rows[: self.screen.rows]
        self.rows(shown, head)
        if len(rows) > len(shown):
            self.rows([((f"and {len(rows) - len(shown)} more: --all shows them", FAINT),)])

    def command(self, command: str) -> None:
        """Add a command on one line, even a very long one, so that it can be copied."""
        self._console.print(Text(f"    {escape(command)}"), soft_wrap=True)


def _share_width(rows: Sequence[Sequence[Text]], room: int) -> list[int]:
    """The width of each column, with no word broken; empty if there is not enough room."""
    columns = list(zip(*rows, strict=True))
    widths = [
        max((Text(word).cell_len for text in column for word in text.plain.split()), default=0)
        for column in columns
    ]
    wanted = [max(text.cell_len for text in column) for column in columns]
    spare = room - sum(widths) - GAP * (len(columns) - 1)
    if spare < 0:
        return []
    # Columns that need the least extra width get it first, so that only the longest texts wrap.
    for number in sorted(range(len(columns)), key=lambda number: wanted[number] - widths[number]):
        more = min(spare, wanted[number] - widths[number])
        widths[number] += more
        spare -= more
    return widths


def _draw(cell: Cell) -> Text:
    text, style = (cell, "") if isinstance(cell, str) else cell
    return Text(escape(text), style)
