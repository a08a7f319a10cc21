"""The tables and users of docs/hold-evictions.md, and the results of the gate."""

import re

from exporter.counters import ReviewOutcome
from exporter.settings import KUBERNETES_EVICTOR, load_settings
from tests.integration.descheduling.gate import fill_table
from tests.support.documents import GATE_RESULTS, HOLD_EVICTIONS, ROOT, bare, chapters, read


SHIPPED = ROOT / "deploy/components/admission/config.yaml"


def test_the_table_of_the_gate_is_that_of_the_last_run() -> None:
    """If the table is filled from the results again, it does not change."""
    assert fill_table(read(GATE_RESULTS)) == read(GATE_RESULTS)


def test_the_outcomes_are_the_program_s() -> None:
    """Each outcome of the program has its row in the page's table."""
    steps = chapters(HOLD_EVICTIONS)["Five steps"]
    rows = re.findall(r"^ *\| (`\w+`) \|", steps, re.MULTILINE)
    assert {bare(row) for row in rows} == set(ReviewOutcome)


def test_the_users_named_are_the_shipped_ones() -> None:
    """The shipped list has all users that the page names, but for Kubernetes' own evictor."""
    listed = chapters(HOLD_EVICTIONS)["Which users to list"]
    named = re.findall(r"`(system:serviceaccount:[^`A-Z]+)`", listed)
    assert named.count(KUBERNETES_EVICTOR) == 1
    assert {*named} - {KUBERNETES_EVICTOR} <= set(load_settings(SHIPPED).admission.users)
