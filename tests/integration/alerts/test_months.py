"""Small scenarios of the alerts' months; `make alert-months` runs all of them."""

import pytest

from tests.months.__main__ import run_scenario
from tests.months.results import DOCUMENT, read_results, render
from tests.months.scenarios import SCENARIOS


def test_the_document_shows_the_results() -> None:
    """docs/alerts.md is written by `make alert-months MONTHS=--write`."""
    results = read_results()
    assert DOCUMENT.read_text() == render(DOCUMENT.read_text(), results)
    assert results.keys() <= SCENARIOS.keys()


AGAIN = {("F6", 3): 1, ("F15", 2): 5}
"""How often alerts fired again, by scenario and seed; docs/alerts.md says why."""


def test_the_results_are_good() -> None:
    """Healthy times call nobody, each fault has its alert and little flaps, no text is untrue."""
    for name, results in read_results().items():
        for result in results:
            assert not result.untrue, name
            assert result.faults or not result.calls, name
            for fault in result.faults:
                assert fault.after is not None, (name, fault.about)
                assert fault.again == AGAIN.get((name, result.seed), 0), (name, fault.about)


@pytest.mark.parametrize("name", ["H8", pytest.param("H9", marks=pytest.mark.soak)])
def test_a_healthy_time_calls_nobody(name: str) -> None:
    """No alert that calls somebody fires."""
    run = run_scenario(name, seed=1)
    assert not run.errors
    assert run.result.calls == {}
    assert not run.result.untrue


@pytest.mark.parametrize(("name", "minutes", "notifications"), [("F2", 45, 1)])
def test_a_fault_is_heard_once(name: str, minutes: float, notifications: int) -> None:
    """A notification comes in time, is not repeated, and the alert ends with the fault."""
    run = run_scenario(name, seed=1)
    assert not run.errors
    assert not run.result.untrue
    for fault in run.result.faults:
        assert fault.after is not None, fault.about
        assert fault.after <= minutes, fault.about
        assert fault.sent <= notifications, fault.about
        assert not fault.again, fault.about
        assert fault.quiet is not None, fault.about
        assert fault.quiet <= 15, fault.about
