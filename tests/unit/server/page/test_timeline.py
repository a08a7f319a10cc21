"""The row that draws the history of a VM on the page's time axis."""

import pytest

from exporter.engine.facts.model import Outcome, Seconds
from exporter.server.api.handlers import Service
from exporter.server.api.schemas import VmiAnswer
from exporter.server.page.timeline import SPANS, Axis, choose_axis, draw_timeline
from exporter.text import to_datetime
from tests.support.builders import NOW, a_running_state, a_state, a_vmi
from tests.unit.server.api.test_handlers import cooling
from tests.unit.server.page.test_model import build_model, evacuating, make_service, vms_of


def the_vmi(service: Service) -> VmiAnswer:
    """The only VM of the page."""
    model = build_model(service)
    return (*vms_of(model).moving.shown, *vms_of(model).blocked.shown)[0][1]


class TestTimeline:
    """The timeline, which draws the history of a VM."""

    AXIS = Axis(to_datetime(NOW - 900.0), to_datetime(NOW), to_datetime(NOW + 100.0))

    def test_a_migration_is_a_bar_and_a_cooldown_a_stretch(self) -> None:
        """A migration is a bar from start to end; a cooldown is another bar, up to the release."""
        line = draw_timeline(the_vmi(make_service(cooling("db1", left=50.0))), self.AXIS)

        (bar,) = line.bars
        assert (bar.x, bar.kind) == (0.0, "succeeded")
        assert line.cooldown is not None
        assert (line.cooldown.x, line.cooldown.x + line.cooldown.width) == (5.0, 95.0)
        assert line.failures == ()
        assert line.label == "1 migration in the last 15 min, cooling down for 50 s more"

    def test_a_failure_is_marked_where_it_ended(self) -> None:
        """A failed migration has its own symbol and text."""
        state = a_state(start=NOW - 300, end=NOW - 200, outcome=Outcome.FAILED)
        line = draw_timeline(the_vmi(make_service(a_vmi(migration=state))), self.AXIS)

        assert line.failures == (70.0,)
        assert [bar.kind for bar in line.bars] == ["failed"]
        assert "1 migration in the last 15 min, 1 failed" in line.label

    def test_one_under_way_reaches_until_now(self) -> None:
        """The bar of a running migration ends at the present time."""
        vmi = evacuating("db1", migration=a_running_state(start=NOW - 450))
        line = draw_timeline(the_vmi(make_service(vmi)), self.AXIS)

        (bar,) = line.bars
        assert (bar.x, bar.width, bar.kind) == (45.0, 45.0, "running")
        assert line.requested == 84.0
        assert line.cooldown is None
        assert line.label == (
            "1 migration in the last 15 min, one under way, evacuation requested 1 min ago"
        )

    def test_what_failed_at_an_unknown_instant_is_not_under_way(self) -> None:
        """A failed migration without a known end is not shown as running."""
        state = a_state(start=NOW - 450, end=None, ended=True, outcome=Outcome.FAILED)
        line = draw_timeline(the_vmi(make_service(evacuating("db1", migration=state))), self.AXIS)

        assert [(bar.x, bar.width, bar.kind) for bar in line.bars] == [(45.0, 0.0, "failed")]
        assert line.failures == (45.0,)
        assert "under way" not in line.label

    @pytest.mark.parametrize(
        ("oldest", "past"), [(30.0, SPANS[0]), (301.0, SPANS[1]), (1e6, 86_400.0)]
    )
    def test_all_share_an_axis_that_holds_them(self, oldest: Seconds, past: Seconds) -> None:
        """All timelines share one axis: the shortest on which they fit, or the whole window."""
        state = a_state(start=NOW - oldest, end=NOW - 20.0)
        model = build_model(make_service(a_vmi(migration=state)))
        vmis = tuple(vmi for _, vmi in vms_of(model).blocked.shown)
        axis = choose_axis(vmis, model.status.as_of, 86_400.0)

        assert axis.past == past
        assert axis.until >= to_datetime(NOW + 0.06 * past)
        assert axis.place(to_datetime(NOW - 10 * past)) == 0.0
        assert axis.place(axis.until) == 100.0
