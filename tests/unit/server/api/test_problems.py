"""The HTTP statuses of refused requests."""

import re
from pathlib import Path

from exporter.server.api.openapi import PROBLEMS


SERVER = Path(__file__).parents[4] / "exporter" / "server"
OF_PASSAGE = {"431"}
"""The answer to a head that is too long; it is sent without aiohttp, and not counted."""


def test_every_status_is_counted_from_0() -> None:
    """`PROBLEMS` has every status with which the code refuses a request."""
    code = "\n".join(path.read_text(encoding="utf-8") for path in SERVER.rglob("*.py"))
    used = {*re.findall(r"Refusal\(\s*(\d{3})", code)} - OF_PASSAGE
    assert len(used) > 8
    assert used <= {*map(str, PROBLEMS)}
