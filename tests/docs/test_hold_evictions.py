"""tests/descheduling/results.md has the results of the last `make soak`."""

from tests.descheduling.gate import fill_table
from tests.support.documents import GATE_RESULTS, read


def test_the_table_of_the_gate_is_that_of_the_last_run() -> None:
    """If the table is filled from the results again, it does not change."""
    assert fill_table(read(GATE_RESULTS)) == read(GATE_RESULTS)
