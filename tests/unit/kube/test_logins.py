"""Each row of the table of logins: the same cluster and user as a program with client-go."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.logins import ANSWERS, Row, ask_ours, read_rows


ROWS = read_rows()


@pytest.fixture(scope="session")
def answers() -> Mapping[str, Mapping[str, Any]]:
    """What client-go and kubectl did for each row."""
    recorded: Mapping[str, Mapping[str, Any]] = json.loads(ANSWERS.read_text())
    return recorded


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
async def test_the_same_cluster_and_user_as_client_go(
    row: Row,
    answers: Mapping[str, Mapping[str, Any]],
    certificates: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exporter sends what client-go sends, and refuses in one sentence what it refuses."""
    expected = answers[row.name]["client-go"]
    outcome = await ask_ours(row, tmp_path / "login", certificates, monkeypatch)
    if row.ours or "refused" in expected:
        assert outcome.refused, outcome.seen
        assert outcome.message.startswith("NoCredentials: ")
        assert "\n" not in outcome.message
        assert "refused" not in expected or not row.ours, "the row differs for no reason"
    elif "failed" in expected:
        assert outcome.refused or "failed" in outcome.seen
    else:
        assert outcome.write() == expected, outcome.message


def test_each_row_has_an_answer(answers: Mapping[str, Mapping[str, Any]]) -> None:
    """The recorded answers are those of the table's rows."""
    assert [*answers] == [row.name for row in ROWS]
    assert len(ROWS) >= 150
