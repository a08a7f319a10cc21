"""The simulated week: its shape, its contents, and its recording."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from itertools import islice

import msgspec
import pytest
from msgspec.structs import replace

from exporter.demo.hand_offs import HandOffs
from exporter.demo.store import KUBEVIRTS, MIGRATIONS, PODS, VMIS
from exporter.demo.week import BEGAN, Week, copy_seconds
from exporter.engine.facts.model import Fact, KubeVirtSettings, Pod, Resource, Vmi, Vmim
from exporter.engine.facts.policy import Reason
from exporter.engine.facts.states import State
from exporter.kube.objects.kubevirt import parse_object
from exporter.whatif import recording
from exporter.whatif.account import BUILTIN
from exporter.whatif.recording import Faults, Kind, Recorded
from tests.support.documents import WHAT_IF
from tests.support.replaying import play


RESOURCES = {
    VMIS: Resource.VMIS,
    MIGRATIONS: Resource.VMIMS,
    PODS: Resource.PODS,
    KUBEVIRTS: Resource.KUBEVIRTS,
}


class RecordedWeek:
    """A simulated week with its recording."""

    def __init__(self, days: float, seed: int = 1) -> None:
        self.days = days
        self.simulated = Week(seed, days)
        self.faults = Faults()
        self.lines = list(self.simulated.lines())
        self.events = list(recording.read(self.lines, self.faults))

    def facts(self) -> dict[tuple[Resource, str, str], Fact]:
        """The recorded objects at the end."""
        facts: dict[tuple[Resource, str, str], Fact] = {}
        for event in self.events:
            if event.resource is None:
                continue
            if event.fact is not None:
                facts[key_of(event.resource, event.fact)] = event.fact
            elif event.kind is Kind.DELETED:
                del facts[event.resource, event.namespace, event.name]
        return facts


def key_of(resource: Resource, fact: Fact) -> tuple[Resource, str, str]:
    """The key of an object."""
    if isinstance(fact, Vmi | Vmim | Pod):
        return resource, fact.namespace, fact.name
    assert isinstance(fact, KubeVirtSettings)
    return resource, "", ""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1.0, id="one day"),
        pytest.param(7.0, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(1200)]),
    ],
)
def week(request: pytest.FixtureRequest) -> RecordedWeek:
    """A simulated week, or only its first day."""
    return RecordedWeek(request.param)


class TestShape:
    """The parameters of descheduler-sim's `week-pilot`."""

    def test_another_seed_is_another_week(self) -> None:
        """The same seed gives the same bytes, and another seed gives another week."""
        first, again, other = (RecordedWeek(0.2, seed).lines for seed in (1, 1, 2))

        assert first == again
        assert first != other

    def test_a_shorter_week_is_the_beginning_of_a_longer_one(self) -> None:
        """A longer week begins with all lines of a shorter week, except the last line."""
        shorter, longer = (RecordedWeek(days).lines for days in (0.18, 0.2))

        assert shorter[:-1] == longer[: len(shorter) - 1]

    @pytest.mark.parametrize(
        ("dirty", "gbps", "seconds"),
        [
            (0.001, 10.0, 68.719484),
            (1000.0, 10.0, 76.347339),
            (4000.0, 10.0, 114.34481),
            (4000.0, 5.0, 686.13138),
        ],
    )
    def test_copying_takes_longer_the_faster_memory_gets_dirty(
        self, dirty: float, gbps: float, seconds: float
    ) -> None:
        """Copying 80 GiB over 10 Gbps takes 69 s, and longer if memory gets dirty faster."""
        assert copy_seconds(80, dirty, gbps) == pytest.approx(seconds, rel=1e-6)

    def test_a_rate_above_the_bandwidth_ends_all_the_same(self) -> None:
        """A migration ends within a day even if the dirty rate is above the bandwidth."""
        assert copy_seconds(80, 20_000, 1.0) < 86_400


class TestRecording:
    """The week is a valid recording."""

    def test_every_line_can_be_read(self, week: RecordedWeek) -> None:
        """Every line of the recording is valid: header, first lists, events and end."""
        header = msgspec.json.decode(week.lines[0])

        assert header == {"format": recording.FORMAT, "version": 1}
        assert not week.faults.count, week.faults.messages
        assert {event.resource for event in week.events if event.kind is Kind.SYNCED} == set(
            RESOURCES.values()
        )
        assert week.events[-1] == Recorded(
            (BEGAN + timedelta(days=week.days)).timestamp(), Kind.ENDED
        )

    def test_says_what_the_whole_objects_would(self, week: RecordedWeek) -> None:
        """At the end, the recorded facts equal the facts that the cluster's own objects give."""
        whole = {}
        for resource, ours in RESOURCES.items():
            for entry in week.simulated.cluster.store.caches[resource].all():
                fact = parse_object(ours, entry.body).fact
                if isinstance(fact, Pod):
                    fact = replace(fact, labels=())  # labels are not recorded
                whole[key_of(ours, fact)] = fact

        assert week.facts() == whole

    def test_goes_on_in_time(self, week: RecordedWeek) -> None:
        """The events are in order of time."""
        instants = [event.at for event in week.events]

        assert instants == sorted(instants)
        assert instants[0] == BEGAN.timestamp()

    def test_comes_line_by_line(self) -> None:
        """The first lines can be read before the week is complete."""
        cluster = Week(1, 7.0)
        list(islice(cluster.lines(), 250))

        assert cluster.cluster.instant == BEGAN


class TestExpectations:
    """What the scenario is meant to show."""

    def test_has_something_to_find(self, week: RecordedWeek, prove: Callable[[str], None]) -> None:
        """The week has stuck evacuations, and with our policy fewer migrations than without."""
        comparison = play(week.events, [BUILTIN["ours"], BUILTIN["none"]])
        ours, none = comparison.accounts
        prove(
            f"week-pilot, {week.days:g} days: {comparison.events:,} events,"
            f" {ours.asked:,} evictions, {ours.allowed:,} allowed; {ours.migrations.ended:,}"
            f" migrations, of one VM at most {ours.migrations.per_vm.quantile(0.9)} (90 %), without"
            f" a cooldown {none.migrations.ended:,} and {none.migrations.per_vm.quantile(0.9)}"
        )

        assert {State.BACKOFF, State.TARGET_UNSCHEDULABLE} & set(ours.stuck.by_state)
        assert ours.stuck.alerted >= 2
        assert ours.allowed < none.allowed
        assert set(none.blocked) <= {Reason.MIGRATION_IN_PROGRESS}  # even without guards
        assert ours.migrations.per_vm.quantile(0.9) < none.migrations.per_vm.quantile(0.9)


@pytest.mark.parametrize("days", [0.5, pytest.param(1.25, marks=pytest.mark.soak)])
def test_who_sees_less_moves_more(prove: Callable[[str], None], days: float) -> None:
    """Of `week-hand-offs`, the reference plugin allows more evictions, and most if it restarts."""
    faults = Faults()
    events = list(recording.read(list(HandOffs(1, days).lines()), faults))
    assert not faults.count, faults.messages
    names = ("reference", "restarted", "recommended")
    accounts = play(events, [BUILTIN[name] for name in names]).accounts
    reference, restarted, recommended = accounts
    allowed = ", ".join(f"{account.contender.name} {account.allowed}" for account in accounts)
    prove(f"week-hand-offs, {days:g} days: of {reference.asked} evictions are allowed: {allowed}")
    assert recommended.blocked[Reason.MIGRATION_IN_PROGRESS] > 0
    assert reference.blocked[Reason.MIGRATION_IN_PROGRESS] == 0
    assert reference.others == recommended.others
    assert recommended.allowed < reference.allowed <= restarted.allowed
    if days > 1.0:
        assert reference.others > 0
        assert reference.allowed < restarted.allowed
    assert recommended.migrations.ended < reference.migrations.ended


@pytest.mark.soak
def test_the_table_of_hand_offs_is_the_document_s() -> None:
    """The command of the document prints the table of the document."""
    (command,) = (
        line for line in WHAT_IF.read_text(encoding="utf-8").splitlines() if "hand-offs --" in line
    )
    words = command.split()[3:]
    run = subprocess.run(
        [sys.executable, "-m", "exporter", *words], capture_output=True, check=True
    )
    table = run.stdout.decode().partition("Attempts that failed")[0]
    assert table in WHAT_IF.read_text(encoding="utf-8"), f"docs/what-if.md needs:\n{table}"


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_twice_the_same_bytes(prove: Callable[[str], None]) -> None:
    """Two runs of `replay --scenario week-pilot` write the same bytes to standard output."""
    command = [sys.executable, "-m", "exporter", "replay", "--scenario", "week-pilot"]
    runs = [
        subprocess.run([*command, "--days", "7"], capture_output=True, check=True) for _ in range(2)
    ]

    assert runs[0].stdout == runs[1].stdout
    cost = runs[0].stderr.decode().strip()
    prove(f"{cost}; sha256 {hashlib.sha256(runs[0].stdout).hexdigest()[:16]}, twice")
    assert cost.startswith("replayed ")
    table = runs[0].stdout.decode().partition("\n\nStuck evacuations,")[0]
    assert table in WHAT_IF.read_text(encoding="utf-8"), f"docs/what-if.md needs:\n{table}"
