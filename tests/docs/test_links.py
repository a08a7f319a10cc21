"""Every link in a document has a target, and every row of a table a head."""

import re
from pathlib import Path

import pytest

from tests.support.documents import DOCUMENTS, ROOT, anchors, read


def links(document: Path) -> list[str]:
    """The targets of the links and pictures that are in this repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", read(document))
    return [target for target in targets if "://" not in target]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    """Each linked file exists, and has the linked heading."""
    for link in links(document):
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_picture_is_used() -> None:
    """Every picture in docs/ is used by a document."""
    shown = {
        (document.parent / link).resolve() for document in DOCUMENTS for link in links(document)
    }

    assert set((ROOT / "docs" / "images").glob("*.png")) <= shown


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_blank_line_cuts_a_table(document: Path) -> None:
    """Rows that stand together begin with a head and its line; other rows are shown as text."""
    text = re.sub(r"(?ms)^```.*?^```$", "", read(document))
    for rows in re.findall(r"(?m)(?:^\|.*\n)+", text):
        _, line, *_ = rows.splitlines()
        assert re.fullmatch(r"[-:| ]+", line), rows
