"""docs/README.md leads each reader to three pages, and says how long they take."""

import re
from pathlib import Path

import pytest

from tests.support.documents import DOORS, anchors, read


PER_MINUTE = 230
"""The words that a reader reads in a minute."""
PAGE = re.compile(r"\[[^]]+\]\(([^)]+)\)[^|]*?, (\d+) min")


def count_words(place: Path, anchor: str) -> int:
    """The words of a document, of one of its chapters, or of all documents of a folder."""
    if place.is_dir():
        return sum(count_words(one, "") for one in place.glob("*.md"))
    text = read(place)
    if anchor:
        assert anchor in anchors(place)
        heading = anchor.replace("-", "[ -]")
        text = re.split(rf"^## {heading}$", text, flags=re.MULTILINE | re.IGNORECASE)[1]
        text = text.partition("\n## ")[0]
    return sum(1 for word in text.split() if re.search(r"\w", word))


@pytest.mark.parametrize("row", re.findall(r"^\| [a-z].*", read(DOORS), re.MULTILINE))
def test_each_reader_has_three_pages(row: str) -> None:
    """Each page takes about the minutes that the row says; an edit of some sentences is allowed."""
    pages = PAGE.findall(row)

    assert len(pages) == 3
    for link, minutes in pages:
        path, _, anchor = link.partition("#")
        takes = count_words(DOORS.parent / path, anchor) / PER_MINUTE
        assert abs(int(minutes) - takes) <= max(1, takes / 5), (link, takes)
