"""No two paragraphs of the documents say the same: twelve words in a row stand in one place."""

import re
from collections.abc import Iterator

from tests.support.documents import DOCUMENTS, ROOT, read


LONG = 12
"""The number of words in a row that two paragraphs must not share."""


def paragraphs() -> Iterator[tuple[str, list[str]]]:
    """Each paragraph, list item and cell of a table: its document and its words.

    Code, the targets of links and what `make` writes between markers are left out.
    """
    for document in DOCUMENTS:
        prose = re.sub(r"<!-- (\S+) -->.*?<!-- /\1 -->", "", read(document), flags=re.DOTALL)
        prose = re.sub(r"^ *```.*?^ *```$", "", prose, flags=re.DOTALL | re.MULTILINE)
        prose = re.sub(r"\]\([^)]*\)", "]", prose)
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )|\|", prose):
            yield str(document.relative_to(ROOT)), re.findall(r"[\w.]+", paragraph.lower())


def find_repeated(texts: Iterator[tuple[str, list[str]]]) -> list[str]:
    """For each paragraph that repeats another: both documents, and the words that they share."""
    first: dict[tuple[str, ...], tuple[int, str]] = {}
    repeated: dict[tuple[int, int], str] = {}
    for number, (document, words) in enumerate(texts):
        for start in range(len(words) - LONG + 1):
            shingle = tuple(words[start : start + LONG])
            place, earlier = first.setdefault(shingle, (number, document))
            if place != number:
                repeated.setdefault((place, number), f"{earlier}, {document}: {' '.join(shingle)}")
    return list(repeated.values())


def test_nothing_is_said_twice() -> None:
    """No paragraph shares twelve words in a row with another."""
    assert find_repeated(paragraphs()) == []
