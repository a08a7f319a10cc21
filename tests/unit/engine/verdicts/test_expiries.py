"""When entries expire."""

import math

from hypothesis import given
from hypothesis import strategies as st

from exporter.engine.facts.changes import Key
from exporter.engine.facts.model import Instant
from exporter.engine.verdicts.expiries import SPARE, Expiries


AFTER = st.sampled_from([1.0, 2.0, 3.0, 4.0, math.inf])
NOW = st.sampled_from([0.0, 1.0, 2.0, 3.0, 4.0])


@given(st.lists(st.tuples(st.sampled_from("abc"), AFTER, NOW)))
def test_each_key_expires_once_at_its_last_instant(
    steps: list[tuple[str, Instant, Instant]],
) -> None:
    """What was replaced before it expired does not expire; the clock may go back."""
    expiries, until, waiting = Expiries(), dict[Key, Instant](), set[Key]()
    for name, after, now in steps:
        key = ("team-a", name)
        expiries.replace(key, until.get(key, math.inf), after)
        until[key] = after
        waiting.add(key)
        due = {key for key in waiting if until[key] <= now}
        assert sorted(expiries.pop(now)) == sorted(due)
        waiting -= due
        assert expiries.next == min((until[key] for key in waiting), default=math.inf)


def test_what_was_replaced_is_dropped() -> None:
    """The memory for replaced expiries is bounded, and none of the others is lost."""
    expiries = Expiries()
    for name in ("a", "b"):
        for at in range(3 * SPARE, 0, -1):
            expiries.replace(("team-a", name), at + 1.0, float(at))
    assert sum(map(len, vars(expiries).values())) <= SPARE + 6
    assert [*expiries.pop(0.5)] == []
    assert sorted(expiries.pop(1.0)) == [("team-a", "a"), ("team-a", "b")]
