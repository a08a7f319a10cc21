"""Changes that are read late, after a watch was down, give the same result as a restart."""

from exporter.engine.facts.model import Fact, Instant, Resource
from tests.support.builders import KEEP, NOW, a_vmi, a_vmim
from tests.support.stores import ClockedStore


FAILED = a_vmim(
    evacuates="n1", created=NOW - 25, phase="Failed", finished=True, finished_at=NOW - 20
)
MARKED = a_vmi(evacuation_node="n1", eviction_requested_at=NOW - 30)


def attempts(*facts: Fact, read_at: Instant = NOW) -> tuple[Instant, int]:
    """The request time and the failed attempts, if all these facts are read at the same time."""
    store = ClockedStore(keep=KEEP)
    store.hide(Resource.PODS)
    store.now = read_at
    for fact in facts:
        store.put(fact)
    [evidence] = store.evacuating()
    assert evidence.marker is not None
    return evidence.marker.requested_at, evidence.marker.failed_since_request()


def test_attempts_that_failed_while_the_watch_was_away() -> None:
    """Late attempts count as they do after a restart, because the request has a date."""
    restarted = attempts(MARKED, FAILED)

    assert restarted == (NOW - 30, 1)
    assert attempts(a_vmi(), MARKED, FAILED) == restarted
    assert attempts(a_vmi(), FAILED, MARKED) == restarted
