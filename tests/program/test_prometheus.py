"""The what-if reads past migrations from KubeVirt's metrics in Prometheus."""

import json
from pathlib import Path

import pytest

from exporter.credentials import CannotAsk
from exporter.engine.facts.model import Outcome, Resource, Trigger, Vmi, Vmim
from exporter.text import write_instant
from exporter.whatif.account import BUILTIN, Account
from exporter.whatif.prometheus import (
    ENDS,
    FAILED,
    MAX_POINTS,
    RETRIED_WITHIN,
    STARTS,
    Prometheus,
    Span,
    Spans,
    cut_windows,
    fetch,
    record_series,
    to_events,
)
from exporter.whatif.recording import Kind, Recorded
from tests.support.builders import NOW
from tests.support.replaying import play
from tests.support.serving import serving
from tests.unit.cli.test_client import ASKED, answering


MINUTE = 60.0
HOUR = 3600.0
A_SERIES = {"metric": {"name": "db1", "migration_name": "m"}, "values": [[NOW, str(NOW)]]}
"""One migration as the metric `STARTS` shows it."""


def a_span(name: str, start: float | None, end: float | None, *, failed: bool = False) -> Span:
    """A migration of one VM; `start` and `end` count from `NOW`."""
    began = NOW + (start or 0.0)
    return Span(
        namespace="shop",
        name=name,
        vm="db1",
        node="n1",
        seen_at=began,
        last_seen_at=NOW + 24 * HOUR,
        start=None if start is None else began,
        end=None if end is None else NOW + end,
        outcome=Outcome.FAILED if failed else Outcome.SUCCEEDED,
    )


def events_of(*spans: Span, hours: float = 10.0) -> list[Recorded]:
    """The events of these migrations."""
    known = {(span.namespace, span.name): span for span in spans}
    return list(to_events(known, NOW, NOW + hours * HOUR))


def account(*spans: Span, name: str = "ours") -> Account:
    """Replay these migrations with one policy; returns its account."""
    return play(events_of(*spans), [BUILTIN[name]]).accounts[0]


def markers(events: list[Recorded]) -> list[tuple[float, str]]:
    """The changes of the VM's marker, in seconds since `NOW`."""
    moves: list[tuple[float, str]] = []
    for event in events:
        if isinstance(event.fact, Vmi) and (
            not moves or moves[-1][1] != event.fact.evacuation_node
        ):
            moves.append((event.at - NOW, event.fact.evacuation_node))
    return moves


class TestEvents:
    """Migrations as events."""

    def test_an_evacuation_is_asked_for_at_its_start(self) -> None:
        """An evacuation becomes an eviction at its start, and ends when its migration succeeds."""
        events = events_of(a_span("kubevirt-evacuation-a", HOUR, HOUR + 60))

        assert markers(events) == [(0, ""), (HOUR, "n1"), (HOUR + 60, "")]

    def test_a_migration_by_hand_is_none(self) -> None:
        """A manual migration is not replayed as an eviction."""
        totals = account(a_span("kubevirt-migrate-vm-a", HOUR, HOUR + 60))

        assert (totals.asked, totals.migrations.ended) == (0, 1)

    def test_evictions_are_answered_as_in_a_recording(self) -> None:
        """An eviction within the cooldown is blocked, as in the replay of a recording."""
        totals = account(
            a_span("kubevirt-evacuation-a", HOUR, HOUR + 60),
            a_span("kubevirt-evacuation-b", HOUR + 300, HOUR + 360),
        )

        assert (totals.allowed, totals.blocked.total(), totals.migrations.ended) == (1, 1, 1)

    def test_failures_in_a_row_are_one_evacuation(self) -> None:
        """Failures in a row are one evacuation, which is stuck at the third failure."""
        spans = [
            a_span(f"kubevirt-evacuation-{n}", HOUR + n * 300, HOUR + n * 300 + 60, failed=True)
            for n in range(4)
        ]
        events = events_of(*spans)
        totals = account(*spans, name="none")

        assert markers(events) == [(0, ""), (HOUR, "n1"), (HOUR + 960 + RETRIED_WITHIN, "")]
        assert (totals.asked, totals.migrations.failed, totals.stuck.count) == (1, 4, 1)

    def test_attempts_that_never_began_are_seen_by_their_failure(self) -> None:
        """A failure without a start counts as a failed attempt."""
        spans = [
            a_span(f"kubevirt-evacuation-{n}", n * 600.0 + HOUR, None, failed=True)
            for n in range(3)
        ]
        for span in spans:
            span.start = None
        totals = account(*spans)

        assert (totals.asked, totals.migrations.ended, totals.stuck.count) == (1, 0, 1)

    def test_what_had_ended_before_is_history_from_the_start(self) -> None:
        """Migrations before the range count for the cooldown."""
        totals = account(
            a_span("kubevirt-evacuation-a", -120, -60), a_span("kubevirt-evacuation-b", 60, 120)
        )

        assert (totals.asked, totals.blocked.total()) == (1, 1)

    def test_an_evacuation_under_way_at_the_beginning_was_asked_for_before(self) -> None:
        """Of an evacuation that began before the range, only the migration is counted."""
        going = a_span("kubevirt-evacuation-a", -30, 60)
        following = a_span("kubevirt-evacuation-b", 120, 180)
        totals = account(going, following)

        assert markers(events_of(going, following))[:2] == [(0, "n1"), (60, "")]
        assert (totals.asked, totals.blocked.total(), totals.migrations.ended) == (1, 1, 1)

    def test_one_between_two_attempts_at_the_beginning_is_under_way_too(self) -> None:
        """An evacuation whose first attempt failed just before the range is under way."""
        spans = (
            a_span("kubevirt-evacuation-a", -120, -60, failed=True),
            a_span("kubevirt-evacuation-b", 120, 180),
        )
        totals = account(*spans)

        assert markers(events_of(*spans)) == [(0, "n1"), (180, "")]
        assert (totals.asked, totals.migrations.ended) == (0, 1)

    def test_a_failure_long_before_is_not_under_way(self) -> None:
        """After an old failure the next evacuation is a new request."""
        totals = account(
            a_span("kubevirt-evacuation-a", -2 * HOUR, -HOUR, failed=True),
            a_span("kubevirt-evacuation-b", 120, 180),
        )

        assert totals.asked == 1

    def test_a_migration_by_hand_at_the_beginning_runs(self) -> None:
        """A manual migration that runs when the range begins is counted, but is no evacuation."""
        going = a_span("kubevirt-migrate-vm-a", -30, 60)

        assert markers(events_of(going)) == [(0, "")]
        assert account(going).migrations.ended == 1

    def test_a_vm_that_has_not_moved_since_is_there_all_the_same(self) -> None:
        """A VM without migrations in the range is in the first list."""
        events = events_of(a_span("kubevirt-migrate-vm-a", -600, -540))

        assert {event.at for event in events} == {NOW, NOW + 10 * HOUR}
        assert sum(isinstance(event.fact, Vmi) for event in events) == 1

    def test_a_migration_that_was_seen_last_without_an_end_holds_nothing_up(self) -> None:
        """A migration that was last seen without an end time blocks no later eviction."""
        lost = a_span("kubevirt-evacuation-a", HOUR, None)
        lost.last_seen_at = NOW + 2 * HOUR
        totals = account(lost, a_span("kubevirt-evacuation-b", 3 * HOUR, 3 * HOUR + 60))

        assert (totals.allowed, totals.blocked.total()) == (2, 0)

    def test_an_attempt_without_a_node_is_one_of_its_evacuation(self) -> None:
        """A failed attempt without a node in the metrics gets the node of its evacuation."""
        failed = a_span("kubevirt-evacuation-a", None, None, failed=True)
        failed.seen_at, failed.node = NOW + 60, ""
        events = events_of(failed, a_span("kubevirt-evacuation-b", 120, 180))
        vmims = [event.fact for event in events if isinstance(event.fact, Vmim)]

        assert {vmim.evacuates for vmim in vmims} == {"n1"}

    def test_five_finished_vmims_are_kept(self) -> None:
        """Five finished VMIMs are kept, as in KubeVirt, so memory does not grow."""
        events = events_of(
            *(a_span(f"kubevirt-migrate-vm-{n}", n * 600.0, n * 600.0 + 60) for n in range(9))
        )
        gone = [event.name for event in events if event.kind is Kind.DELETED]

        assert gone == [f"kubevirt-migrate-vm-{n}" for n in range(4)]

    def test_the_events_are_in_order_whatever_the_vms(self) -> None:
        """The events of all VMs are in order and within the range."""
        spans = [a_span(f"kubevirt-evacuation-{n}", n * 50.0, n * 50.0 + 70) for n in range(20)]
        for number, span in enumerate(spans):
            span.vm = f"vm{number % 3}"
        events = events_of(*spans)

        assert [event.at for event in events] == sorted(event.at for event in events)
        assert events[-1] == Recorded(NOW + 10 * HOUR, Kind.ENDED)


class TestSeries:
    """The metrics' labels and values."""

    def test_one_migration_is_told_by_three_metrics(self) -> None:
        """Start, end and outcome of a migration are joined by the VMIM's name."""
        spans: Spans = {}
        labels = {"namespace": "shop", "name": "db1", "migration_name": "m", "node": "n1"}
        record_series(spans, STARTS, labels, [(NOW, str(NOW - 5)), (NOW + 60, str(NOW - 5))])
        record_series(spans, ENDS, labels | {"status": "failed"}, [(NOW + 60, str(NOW + 30))])
        vmim = {"exported_namespace": "shop", "namespace": "kubevirt", "vmi": "db1", "vmim": "m"}
        record_series(spans, FAILED, vmim, [(NOW + 60, "1")])

        (span,) = spans.values()
        assert (span.start, span.end, span.outcome) == (NOW - 5, NOW + 30, Outcome.FAILED)
        assert (span.seen_at, span.last_seen_at, span.node) == (NOW, NOW + 60, "n1")

    @pytest.mark.parametrize("value", ["NaN", "+Inf", "words", ""])
    def test_a_value_that_is_no_instant_is_none(self, value: str) -> None:
        """A migration with an invalid start time exists, but has no start."""
        spans: Spans = {}
        record_series(spans, STARTS, {"name": "db1", "migration_name": "m"}, [(NOW, value)])

        assert spans["", "m"].start is None

    def test_without_a_name_it_is_nobody_s(self) -> None:
        """Series without a VMIM's name are ignored."""
        spans: Spans = {}
        record_series(spans, STARTS, {"name": "db1"}, [(NOW, "1")])

        assert not spans

    @pytest.mark.parametrize(
        ("name", "trigger"),
        [
            ("kubevirt-evacuation-x", Trigger.EVACUATION),
            ("kubevirt-workload-update-x", Trigger.WORKLOAD_UPDATE),
            ("mine", Trigger.MANUAL),
        ],
    )
    def test_the_trigger_is_in_the_name(self, name: str, trigger: Trigger) -> None:
        """The name of a VMIM gives its trigger."""
        assert a_span(name, 0, 1).trigger is trigger


@pytest.mark.parametrize("steps", [0, 1, MAX_POINTS - 1, MAX_POINTS, 3 * MAX_POINTS + 7])
def test_windows_cover_the_range_once(steps: int) -> None:
    """Each point in time is in exactly one window, and no window exceeds Prometheus's limit."""
    points: list[float] = []
    for since, until in cut_windows(NOW, NOW + steps * 60, 60.0):
        count = round((until - since) / 60) + 1
        assert count <= MAX_POINTS
        points += [since + number * 60 for number in range(count)]

    assert points == [NOW + number * 60 for number in range(steps + 1)]


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (401, "no", "401, no answer of Prometheus's API"),
        (200, "<html>", "200, no answer of Prometheus's API"),
        (503, '{"status":"error","error":"busy"}', "503 busy"),
    ],
)
async def test_what_is_no_prometheus_is_told(status: int, body: str, why: str) -> None:
    """An HTTP error, or an answer that is not of Prometheus's API, is reported with its status."""
    async with serving(answering(status, body.encode())) as url:
        with pytest.raises(CannotAsk, match=why):
            await fetch(Prometheus(f"{url}/"), NOW, NOW + 60, step=60.0)


async def test_nobody_there_is_told() -> None:
    """A connection error names the address."""
    with pytest.raises(CannotAsk, match=r"127\.0\.0\.1:9"):
        await fetch(Prometheus("http://127.0.0.1:9"), NOW, NOW + 60, step=60.0)


async def test_a_token_is_sent_where_it_is_safe(tmp_path: Path) -> None:
    """The token is sent only over TLS or to loopback."""
    app = answering(body=json.dumps({"status": "success", "data": {"result": [A_SERIES]}}).encode())
    token = tmp_path / "token"
    token.write_text("abc\n")
    async with serving(app) as url:
        await fetch(Prometheus(url, token_file=token), NOW, NOW + 60, step=60.0)
    with pytest.raises(CannotAsk, match="a token is only sent over https"):
        await fetch(Prometheus("http://10.0.0.1", token_file=token), NOW, NOW + 60, step=60.0)

    assert {row.headers["Authorization"] for row in app[ASKED]} == {"Bearer abc"}
    assert {(row.method, row.path) for row in app[ASKED]} == {("POST", "/api/v1/query_range")}


async def test_a_prometheus_without_kubevirt_s_metrics_is_told() -> None:
    """A Prometheus without KubeVirt's metrics is an error, not a quiet cluster."""
    async with serving(answering(body=b'{"status": "success", "data": {"result": []}}')) as url:
        with pytest.raises(CannotAsk) as refused:
            await fetch(Prometheus(url), NOW, NOW + 60, step=60.0)

    assert str(refused.value) == (
        f"{url} has no kubevirt_vmi_migration_* between {write_instant(NOW)} and"
        f" {write_instant(NOW + 60)}: does it scrape KubeVirt?"
    )


async def test_files_that_are_not_there_are_told(tmp_path: Path) -> None:
    """A missing token or CA file is an error that names the path."""
    missing = tmp_path / "none"
    for place, option in (
        (Prometheus("https://127.0.0.1:9", token_file=missing), "--token-file"),
        (Prometheus("https://127.0.0.1:9", ca_file=missing), "--ca-file"),
    ):
        with pytest.raises(CannotAsk, match=f"{option} {missing}:? cannot be read: No such file"):
            await fetch(place, NOW, NOW + 60, step=60.0)


def test_both_metrics_of_a_resource_are_events_of_it() -> None:
    """An event about a VMI has the resource `VMIS`; one about a VMIM has `VMIMS`."""
    for event in events_of(a_span("kubevirt-evacuation-a", 60, 120)):
        if event.fact is not None:
            assert event.resource is (
                Resource.VMIS if isinstance(event.fact, Vmi) else Resource.VMIMS
            )
