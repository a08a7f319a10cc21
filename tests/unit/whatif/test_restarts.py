"""What a caller that restarts forgets."""

import pytest

from exporter.engine.facts.model import Outcome
from exporter.whatif.counterfactual import forget
from tests.support.builders import NOW, a_history, a_migration, some_evidence


DAY = 86_400.0
MIDNIGHT = NOW // DAY * DAY


@pytest.mark.parametrize(
    ("every", "kept"),
    [(0.0, {"f1", "m1", "m2", "m3", "m4", "f2", "new"}), (DAY, {"m2", "m3", "m4", "new"})],
    ids=["never", "every-day"],
)
def test_a_restart_keeps_the_successes_of_the_newest_five(every: float, kept: set[str]) -> None:
    """Of the migrations before the restart, the successes of the five newest are known."""
    names = ("m1", "m2", "f1", "m3", "m4", "f2")
    older = {
        name: a_migration(
            end=MIDNIGHT - 600.0 + 60.0 * number,
            outcome=Outcome.FAILED if name.startswith("f") else Outcome.SUCCEEDED,
        )
        for number, name in enumerate(names)
    }
    newer = a_migration(end=MIDNIGHT + 60.0, outcome=Outcome.FAILED)
    evidence = some_evidence(history=a_history(**older, new=newer))
    assert set(forget(evidence, every, MIDNIGHT + 3600.0).history.records()) == kept
