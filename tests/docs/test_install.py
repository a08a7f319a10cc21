"""docs/install.md: the checks after an installation name metrics that exist."""

import re

from exporter.metrics.exposition import FAMILIES
from tests.support.documents import INSTALL, table


def test_the_checks_name_metrics_of_the_program() -> None:
    """Every metric in the table of checks exists."""
    families = {family.name for family in FAMILIES}
    text = "\n".join("|".join(row) for row in table(INSTALL, "Check that it works"))
    named = set(re.findall(r"\b(kubevirt_eviction_exporter_\w+?)(?:_count)?\b", text))

    assert named
    assert named <= families
