"""The page for people."""

from typing import Any

import pytest

from exporter import __version__
from exporter.health import Staleness
from exporter.page import Summary, render_page


def a_summary(**overrides: Any) -> Summary:
    """Synced, with ten VMIs of which three are blocked."""
    fields: dict[str, Any] = {
        "ready": True,
        "staleness": Staleness.FRESH,
        "waiting_for": [],
        "refused": {},
        "observed_at": "2027-01-15T08:00:00Z",
        "vmis": 10,
        "blocked": 3,
    } | overrides
    return Summary(**fields)


@pytest.mark.parametrize(
    ("summary", "text"),
    [
        pytest.param(a_summary(), "synced", id="fresh"),
        pytest.param(a_summary(staleness=Staleness.STALE), "stale: the API server", id="stale"),
        pytest.param(a_summary(staleness=Staleness.DEAD), "only cooldowns still block", id="dead"),
        pytest.param(
            a_summary(ready=False, waiting_for=["pods", "kubevirts"]),
            "not ready: waiting for pods, kubevirts",
            id="not-ready",
        ),
        pytest.param(a_summary(observed_at=None), "none yet", id="no-contact"),
        pytest.param(a_summary(refused={"pods": "403 no"}), "Runs without pods", id="refused"),
        pytest.param(a_summary(), __version__, id="version"),
    ],
)
def test_says_whether_it_can_be_trusted(summary: Summary, text: str) -> None:
    """The page tells the state in words."""
    assert text in render_page(summary)


def test_escapes_what_comes_from_outside() -> None:
    """What an API server says is shown as text, braces included."""
    page = render_page(a_summary(refused={"pods": "<script>alert(1)</script> {table}"}))

    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; {table}" in page
