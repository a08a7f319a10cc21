"""The wall clock notices when it is set."""

from exporter.clock import WallClock


class Machine:
    """A machine whose wall clock can be set."""

    def __init__(self) -> None:
        self.wall, self.elapsed = 1000.0, 10.0
        self.clock = WallClock(lambda: self.wall, lambda: self.elapsed)
        self.steps: list[float] = []
        self.clock.on_step.append(self.steps.append)

    def pass_time(self, seconds: float, *, set_by: float = 0.0) -> float:
        """Let time pass, set the clock, and read it."""
        self.wall += seconds + set_by
        self.elapsed += seconds
        return self.clock()


def test_time_that_passes_is_no_step() -> None:
    """Time passes, also while the machine is suspended."""
    machine = Machine()

    assert machine.pass_time(5.0) == 1005.0
    assert machine.pass_time(86_400.0) == 87_405.0
    assert not machine.steps


def test_a_step_is_named_once() -> None:
    """A step back or forward is reported once, with its length, before the time is returned."""
    machine = Machine()

    assert machine.pass_time(1.0, set_by=-3600.0) == -2599.0
    machine.pass_time(1.0)
    machine.pass_time(1.0, set_by=86_400.0)

    assert machine.steps == [-3600.0, 86_400.0]


def test_a_slewed_clock_is_followed() -> None:
    """Small corrections add up without becoming a step."""
    machine = Machine()
    for _ in range(100):
        machine.pass_time(10.0, set_by=0.1)

    assert not machine.steps
