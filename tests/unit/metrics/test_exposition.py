"""The exposition of the metrics.

`python -m tests.unit.metrics.test_exposition` writes the golden text anew. Read its diff.
"""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

from exporter import __version__
from exporter.counters import SERIES_KEPT_FOR, Counters, ReviewOutcome
from exporter.engine.evacuations.events import EventOutcome, EventReason
from exporter.engine.facts.model import (
    CLUSTER_RESOURCES,
    Checkpoint,
    EndReason,
    Instant,
    KubeVirtSettings,
    MigrationLimits,
    Mismatch,
    Outcome,
    Resource,
    Trigger,
)
from exporter.engine.facts.policy import Override, Reason, StuckPolicy
from exporter.engine.facts.states import State
from exporter.engine.facts.trust import Trust
from exporter.engine.store.evacuation_ends import EvacuationEnd, EvacuationOutcome
from exporter.engine.store.node_drains import DrainEnd
from exporter.engine.store.requesters import Source
from exporter.health import Health, Restart, Watched
from exporter.metrics.counts import BLOCKS, PREVENTED, forget_old_counts
from exporter.metrics.exposition import FAMILIES, NAMES, Exposition, sample
from exporter.metrics.family import SLICE, View
from exporter.metrics.vms import COOLING
from tests.support.builders import (
    KEEP,
    NAMESPACE,
    NOW,
    a_cordon,
    a_pod,
    a_policy,
    a_running_state,
    a_state,
    a_vmi,
    a_vmim,
    an_ended_vmim,
)
from tests.support.stores import ClockedStore, a_verdict_view, put, remove


GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "metrics.txt"
PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text"
PER_VMI = {f for f in FAMILIES if f.name.startswith("kubevirt_vmi_evac")} | {*COOLING}


def an_empty_view(*, contact: Instant | None = None) -> View:
    """The view of a process that has just started, or of one with this last contact."""
    store, policy = ClockedStore(keep=KEEP), a_policy()
    watches = [
        Watched(resource, None, synced=contact is not None, contact=contact)
        for resource in CLUSTER_RESOURCES
    ]
    return View(
        store=store,
        verdicts=a_verdict_view(store, policy),
        health=Health(180.0, 600.0, watches),
        counters=Counters(),
        policy=policy,
        stuck=StuckPolicy(),
        vmi_series=20,
        now=NOW,
    )


def a_view() -> View:
    """A view with samples of every family."""
    view = an_empty_view()
    store, counters = view.store, view.counters
    assert isinstance(store, ClockedStore)
    store.put(a_vmi())
    store.put(a_vmi(name="db2", uid="2", node="n2"))
    store.now = NOW - 5000.0
    asked = {"eviction_requested_at": NOW - 4000.0, "evicted_by_descheduler": True}
    leaves = {"evacuation_node": "n2", "eviction_strategy": "LiveMigrate"} | asked
    store.put(a_vmi(name="db3", uid="3", node="n2", migration=a_state(), **leaves))
    store.put(a_pod(name="virt-launcher-db3", uid="p3", vmi_uid="3", node="n2"))
    store.put(an_ended_vmim(name="gone", uid="gone", vmi_name="db3", trigger=Trigger.EVACUATION))
    store.put(a_cordon(name="n2", cordoned_at=NOW - 4000.0))
    store.put(a_vmim())
    store.put(a_pod())
    store.put(KubeVirtSettings(MigrationLimits(cluster=7, outbound_per_node=3)))
    for number, watched in enumerate(view.health.watched):
        watched.synced, watched.contact, watched.lists = True, NOW + number, 1 + number
    denied = Watched(Resource.PODS, "denied", rejected="403 no", invalid_objects=4)
    denied.restarts[Restart.DENIED] = 7
    view.health.watched += [denied, Watched(Resource.PODS, "not-listed-yet")]
    counters.begun_cooldowns.observe(1800.0)
    counters.count_drain(DrainEnd.SUCCEEDED, 700.0)
    counters.count_drain(DrainEnd.CANCELLED, 9000.0)
    for outcome in EvacuationOutcome:
        counters.count_evacuation(
            EvacuationEnd(
                vmi_uid="u",
                namespace="shop",
                name="db1",
                node="n1",
                source=Source.DESCHEDULER,
                outcome=outcome,
                duration=1800.0,
            )
        )
    counters.count_migration_to("n2", "", Outcome.SUCCEEDED, NOW)
    counters.count_migration_to("n9", a_vmi().uid, Outcome.FAILED, NOW)
    counters.rejected_connections.update(query=0, metrics=2)
    counters.verdicts[Checkpoint.FILTER, True] += 5
    counters.verdicts[None, False] += 2
    counters.count_block(Reason.COOLDOWN, "n1", "shop", 900.0, now=NOW)
    counters.count_block(Reason.COOLDOWN, "n1", "shop", 3600.5, now=NOW)
    counters.count_block(Reason.MIGRATION_IN_PROGRESS, "n2", "shop", None, now=NOW)
    counters.count_block(Reason.EVACUATION_IN_PROGRESS, 'n"3\\', "a\nb", 40_000.0, now=NOW)
    counters.prevented.moves["web"] = 3
    counters.prevented.migration_seconds["web"] = 187.5
    counters.unknown_candidates[Mismatch.UID] = 2
    counters.task_failures["lease"] = 1
    counters.count_request("verdicts", 0.004)
    counters.count_request("verdicts", 6.0)
    counters.expect_requests("blocked")
    counters.reviews = Counter(dict.fromkeys(ReviewOutcome, 0) | {ReviewOutcome.DENIED: 3})
    counters.events = Counter({(EventReason.EVICTION_BLOCKED, EventOutcome.WRITTEN): 5})
    view.health.certificates["query"] = NOW + 86_400
    judge_in_order(view)
    return view


def judge_in_order(view: View) -> None:
    """Judge the VMIs by name, so that the order of the samples does not depend on hashes."""
    verdicts = view.verdicts.read(view.now, Trust())
    for key in sorted(view.store.keys()):
        verdicts.find(*key)


def rendered(view: View, accept: str = "") -> str:
    """The exposition of a view, without the process metrics."""
    body, _ = scraped(Exposition(lambda: view, process=False), accept)
    return body.decode()


def scraped(exposition: Exposition, accept: str = "") -> tuple[bytes, str]:
    """The body of a scrape and its content type."""
    parts, content_type = asyncio.run(exposition.render(accept))
    return b"".join(parts), content_type


def golden() -> str:
    """The golden text, which is the exposition of a fixed view without the exporter's version."""
    return rendered(a_view()).replace(f'"{__version__}"', '"VERSION"')


def parse_strictly(text: str) -> list[Metric]:
    """The families of an OpenMetrics exposition, parsed by prometheus_client."""
    return list(text_string_to_metric_families(text))  # type: ignore[no-untyped-call]


def samples(families: list[Metric]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample by its name and labels."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_equals_the_golden_exposition() -> None:
    """A fixed store at a fixed time renders to the golden text."""
    expected = GOLDEN.read_text(encoding="utf-8").splitlines()

    assert golden().splitlines() == expected, (
        "If the change is intended, run `.venv/bin/python -m tests.unit.metrics.test_exposition`."
    )


class _ViewCollector(Collector):
    """The samples of a view as a collector for prometheus_client."""

    def __init__(self, view: View, accept: str) -> None:
        self._view = view
        self._is_unique = accept == ""
        """Whether a counter may have the name of a gauge with `_total` added."""

    def collect(self) -> Iterator[Metric]:
        """Every family as a metric of prometheus_client."""
        for family, samples in sample(self._view):
            name = family.name.removesuffix("_total") if family.type == "counter" else family.name
            metric = Metric(name, family.help_line, family.type)
            if name != family.name and name in NAMES and not self._is_unique:
                metric = Metric(family.name, family.help_line, "unknown")
            for entry in samples:
                labels = dict(zip(family.labels, entry.labels, strict=True))
                suffix = "_total" if family.type == "counter" else entry.suffix
                metric.add_sample(
                    name + suffix, labels | ({"le": entry.le} if entry.le else {}), entry.value
                )
            yield metric


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
@pytest.mark.parametrize("view", [an_empty_view(), a_view()], ids=["empty", "full"])
def test_written_as_prometheus_client_writes(view: View, accept: str) -> None:
    """The output equals that of prometheus_client, also for labels that need escapes."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ViewCollector(view, accept))
    encode, content_type = choose_encoder(accept)

    assert scraped(Exposition(lambda: view, process=False), accept) == (
        encode(registry),
        content_type,
    )


def test_every_family_is_sampled_in_order() -> None:
    """Every family in `FAMILIES` is sampled once, in the same order."""
    assert [family for family, _ in sample(a_view())] == list(FAMILIES)
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)


def test_prevented_moves_are_0_where_a_vm_may_be_asked_for() -> None:
    """The counters of a namespace are 0 as soon as a VM in it migrates or cools down."""
    view = an_empty_view()
    put(view.store, a_vmi(namespace="idle"))
    put(view.store, a_vmi(namespace="cools", uid="2", migration=a_state()))
    put(view.store, a_vmi(namespace="moves", uid="3", migration=a_running_state()))
    view.counters.prevented.moves["was"] = 2
    view.counters.prevented.migration_seconds["was"] = 60.0
    values = samples(list(parse_text(rendered(view))))

    for family, counted in zip(PREVENTED, (2, 60), strict=True):
        assert {
            labels: value for (name, labels), value in values.items() if name == family.name
        } == {
            (("namespace", "cools"),): 0,
            (("namespace", "moves"),): 0,
            (("namespace", "was"),): counted,
        }


def test_each_policy_has_its_own_settings_and_vms() -> None:
    """The label `policy` is the name of the override, or `default` for VMs without one."""
    own = a_policy(max_migration_cooldown=43_200.0)
    policy = a_policy(overrides=(Override(name="dbs", policy=own, namespaces=("shop",)),))
    view = an_empty_view()
    view = replace(view, policy=policy, verdicts=a_verdict_view(view.store, policy))
    put(view.store, a_vmi(override="dbs", migration=a_state()))
    lines = rendered(view).splitlines()

    family = "kubevirt_eviction_exporter_policy_seconds"
    for name, cap in (("default", 21_600.0), ("dbs", 43_200.0)):
        assert f'{family}{{policy="{name}",setting="max_migration_cooldown"}} {cap}' in lines
    cooling = 'cooldown_seconds{name="db1",namespace="shop",node="n1",policy="dbs"}'
    assert [line for line in lines if cooling in line]


OF_RESOURCES = {
    *("synced", "permission_missing", "last_contact_timestamp_seconds", "objects"),
    *("lists_total", "invalid_objects_total"),
}
BOUNDS = ("900.0", "1800.0", "3600.0", "7200.0", "14400.0", "21600.0", "+Inf")
CLOSED: dict[str, set[tuple[tuple[str, str], ...]]] = {
    "kubevirt_eviction_exporter_unknown_candidates_total": {
        (("reason", mismatch),) for mismatch in Mismatch
    },
    "kubevirt_eviction_exporter_watch_restarts_total": {
        (("reason", why), ("resource", resource))
        for resource in CLUSTER_RESOURCES
        for why in Restart
    },
    **{
        f"kubevirt_eviction_exporter_{name}": {
            (("resource", resource),) for resource in CLUSTER_RESOURCES
        }
        for name in sorted(OF_RESOURCES)
    },
    "kubevirt_eviction_exporter_stuck_evacuations": {
        (("source", source), ("state", state)) for source in Source for state in State
    },
    "kubevirt_eviction_exporter_migrations_total": {
        (("outcome", outcome), ("reason", reason), ("trigger", trigger))
        for reason in EndReason
        for outcome in ["succeeded" if reason is EndReason.NONE else "failed"]
        for trigger in Trigger
    },
    "descheduler_kubevirt_effective_cooldown_seconds_bucket": {
        (("le", bound),) for bound in BOUNDS
    },
    "kubevirt_eviction_exporter_cooldown_duration_seconds_bucket": {
        (("le", bound),) for bound in BOUNDS
    },
}


@pytest.mark.parametrize("name", CLOSED)
def test_closed_labels_are_there_from_the_start(name: str) -> None:
    """A label with a fixed set of values has a series at 0 for each value from the start."""
    values = samples(list(parse_text(rendered(an_empty_view()))))
    own = {labels: value for (metric, labels), value in values.items() if metric == name}

    assert set(own) == CLOSED[name]
    assert set(own.values()) == {0.0}


def test_a_series_goes_with_its_fact() -> None:
    """The series of KubeVirt's limits end when the KubeVirt object is deleted."""
    view = a_view()
    before = rendered(view)
    remove(view.store, Resource.KUBEVIRTS, "kubevirt", "kubevirt")

    assert 'migration_limit{scope="cluster"} 7.0' in before
    assert "migration_limit{" not in rendered(view)


@pytest.mark.parametrize(
    ("accept", "open_metrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/html", False),
        ("text/plain;version=0.0.4", False),
        ("text/plain;version=1.0.0;escaping=allow-utf-8", False),
        (OPENMETRICS, True),
        (f"{OPENMETRICS};version=1.0.0", True),
        (f"{OPENMETRICS}; version=1.0.0 ;q=0.5", True),
        ("APPLICATION/OpenMetrics-Text;Version=1.0.0", True),
        (f"{OPENMETRICS};version=0.0.1", False),
        (f"{OPENMETRICS};version=2.0.0", False),
        (f"{OPENMETRICS};version=2.0.0,{OPENMETRICS};version=1.0.0;q=0.5", True),
        (f"{OPENMETRICS};version=x", False),
        (f"{OPENMETRICS};version=", False),
        (f"{OPENMETRICS};q=0", False),
        (f"{OPENMETRICS};q=0.000, text/plain", False),
        (f"{OPENMETRICS};q=0.001", True),
        (f"{OPENMETRICS};q=abc", True),
        ("application/vnd.google.protobuf;proto=x;encoding=delimited", False),
        (";;,=;q=,,\x00", False),
        (f"{OPENMETRICS};version=1.0.0," * 2000, True),
    ],
)
def test_negotiation_never_fails(accept: str, open_metrics: bool) -> None:
    """For any Accept header, the body has the format that its Content-Type says."""
    body, content_type = scraped(Exposition(an_empty_view, process=False), accept)

    if open_metrics:
        assert content_type.startswith(f"{OPENMETRICS}; version=1.0.0;")
        assert parse_strictly(body.decode())
    else:
        assert content_type == PLAIN
        assert list(parse_text(body.decode()))


@pytest.mark.parametrize("most", [1, 2, 3, 4, 9])
def test_series_of_single_vmis_are_bounded(most: int) -> None:
    """The same `vmi_series` VMIs have all series, evacuating ones first. The others are counted."""
    names = ("evacuating", "moving", "failing", "cooling")
    view = replace(an_empty_view(contact=NOW), vmi_series=most)
    put(view.store, a_vmi(name="cooling", uid="1", migration=a_state()))
    put(view.store, a_vmi(name="failing", uid="2", migration=a_state()))
    view.counters.count_migration_to("n9", "2", Outcome.FAILED, NOW)
    put(view.store, a_vmi(name="moving", uid="3"), a_vmim(vmi_name="moving"))
    evacuating = a_vmi(name="evacuating", uid="4", evacuation_node="n1", migration=a_state())
    put(view.store, evacuating)
    values = samples(list(parse_text(rendered(view))))
    shown = {dict(labels)["name"] for _, labels in values if "name" in dict(labels)}

    assert shown == set(names[:most])
    assert values["kubevirt_eviction_exporter_vmis_left_out", ()] == len(names[most:])


def read_blocks(view: View) -> dict[tuple[str, str], float]:
    """The count of blocks by reason and node."""
    return {
        (sample.labels["reason"], sample.labels["node"]): sample.value
        for family in parse_text(rendered(view))
        for sample in family.samples
        if sample.name == BLOCKS.name
    }


def test_blocks_are_foreseen_on_the_node_of_the_target_pod() -> None:
    """While a VM moves, its blocks are exposed as 0 for both nodes."""
    view = an_empty_view(contact=NOW)
    target = a_pod(name="target", uid="p2", node="n2", migration_uid="m1", ready=False)
    put(view.store, a_vmi(), a_vmim(), a_pod(), target)
    reasons = ("migration_in_progress", "cooldown")
    assert read_blocks(view) == {(reason, node): 0 for reason in reasons for node in ("n1", "n2")}


def test_at_most_so_many_blocks_are_foreseen() -> None:
    """At most `vmi_series` counters of blocks are exposed as 0, and every one that was counted."""
    view = replace(an_empty_view(), vmi_series=2)
    for number in range(4):
        node, uid = f"n{number}", f"{number}"
        put(view.store, a_vmi(name=f"db{number}", uid=uid, node=node, migration=a_state()))
    judge_in_order(view)
    view.counters.count_block(Reason.COOLDOWN, "n3", "shop", 900.0, now=NOW)
    view.counters.count_block(Reason.POLICY, "n9", "shop", None, now=NOW)
    zeros = {("cooldown", f"n{number}"): 0 for number in range(2)}
    assert read_blocks(view) == zeros | {("cooldown", "n3"): 1, ("policy", "n9"): 1}


def test_series_of_single_vmis_go_with_their_fact() -> None:
    """A VMI has no series after its evacuation and its cooldown."""
    view = a_view()
    assert 'name="db3"' in rendered(view)
    put(view.store, a_vmi(name="db3", uid="3", node="n2", migration=a_state()))
    evacuations = [line for line in rendered(view).splitlines() if "kubevirt_vmi_evac" in line]
    assert all(line.startswith("#") for line in evacuations)
    later = replace(view, now=NOW + 100_000)
    assert 'name="db3"' not in rendered(later)


@pytest.mark.parametrize("change", [{"uid": "next"}, {"phase": "Failed"}], ids=["next", "stopped"])
def test_series_of_single_vmis_go_with_their_vm(change: dict[str, str]) -> None:
    """A VM that was recreated or has stopped has no series, also not of a failed target."""
    view = an_empty_view()
    evacuating = a_vmi(evacuation_node="n1", migration=a_state())
    put(view.store, evacuating)
    view.counters.count_migration_to("n9", evacuating.uid, Outcome.FAILED, NOW)
    assert 'kubevirt_vmi_failed_target{name="db1",namespace="shop",target="n9"}' in rendered(view)

    remove(view.store, Resource.VMIS, NAMESPACE, "db1")
    put(view.store, replace(a_vmi() if "uid" in change else evacuating, **change))
    assert 'name="db1"' not in rendered(view)


def a_crowd(vmis: int) -> View:
    """A view with this many VMIs that evacuate and cool down."""
    view = replace(an_empty_view(), vmi_series=10_000)
    for i in range(vmis):
        put(view.store, a_vmi(name=f"db{i}", uid=f"{i}", evacuation_node="n1", migration=a_state()))
    return view


def test_a_scrape_is_of_one_instant() -> None:
    """Changes during a scrape appear only in the next scrape."""
    view, quiet = a_crowd(2 * SLICE + 1), a_crowd(2 * SLICE + 1)
    pieces = []
    for number, (family, samples) in enumerate(sample(view)):
        pieces.append((family, list(samples)))
        view.counters.count_request("metrics", 1.0)
        view.health.watched[0].contact = NOW + number
        put(view.store, a_vmi(name=f"db{number}", uid=f"{number}", node="n2"))
        put(view.store,
            an_ended_vmim(
                name=f"m{number}", uid=f"m{number}", vmi_name=f"db{SLICE + number}",
                phase="Failed", evacuates="n1", created=NOW,
            )
        )  # fmt: skip
        remove(view.store, Resource.VMIS, NAMESPACE, f"db{2 * SLICE - number}")

    assert pieces == [(family, list(samples)) for family, samples in sample(quiet)]
    assert pieces != [(family, list(samples)) for family, samples in sample(view)]


def test_no_slice_is_longer_than_others() -> None:
    """No part of a scrape has more VMIs than `SLICE`, and no VMI is missing."""
    view = a_crowd(3 * SLICE)
    pieces = [(family, list(samples)) for family, samples in sample(view)]
    counted = Counter(family.name for family, samples in pieces for _ in samples)

    assert max(len(samples) for family, samples in pieces if family in PER_VMI) == SLICE
    assert {counted[family.name] for family in PER_VMI} == {3 * SLICE}


async def test_others_are_answered_while_a_scrape_is_written() -> None:
    """Other tasks run between the slices of a scrape."""
    view = a_crowd(3 * SLICE)
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    await Exposition(lambda: view, process=False).render("")
    other.cancel()

    assert turns >= 2 + len(list(sample(view)))


async def test_scrapes_wait_for_each_other() -> None:
    """Scrapes that come at the same time are written one after the other."""
    view = a_crowd(3 * SLICE)
    exposition = Exposition(lambda: view, process=False)
    turns: list[int] = []

    async def count(scrapes: int) -> tuple[list[bytes], str]:
        rendering = asyncio.gather(*(exposition.render("") for _ in range(scrapes)))
        turns.append(0)
        while not rendering.done():
            turns[-1] += 1
            await asyncio.sleep(0)
        return rendering.result()[-1]

    await count(1)
    first, two = await count(1), await count(2)

    assert first == two
    assert turns[2] >= 2 * turns[1] - 5


def test_the_process_has_metrics() -> None:
    """The usual metrics of the process are exposed."""
    body, _ = scraped(Exposition(an_empty_view))

    assert b"process_resident_memory_bytes" in body


def test_a_scrape_changes_no_counts() -> None:
    """Counts that may be dropped are still there after a scrape, which only reads them."""
    view = a_view()
    late = replace(view, now=NOW + SERIES_KEPT_FOR)
    before = rendered(late)

    assert rendered(late) == before
    assert "evacuation_in_progress" in {reason for reason, _, _ in view.counters.blocks}
    forget_old_counts(view.counters, view.store, late.now)
    assert rendered(late) != before


def test_the_blocks_of_a_node_that_is_gone_end() -> None:
    """The block series of a node without VMIs end a day after the node's last blocked eviction."""
    view = a_view()
    nodes = []
    for seen in (view, replace(view, now=NOW + SERIES_KEPT_FOR)):
        forget_old_counts(seen.counters, seen.store, seen.now)
        nodes += [
            {sample.labels[1] for sample in samples}
            for family, samples in sample(seen)
            if family is BLOCKS
        ]
    assert nodes == [{"n1", "n2", 'n"3\\'}, {"n1", "n2"}]


if __name__ == "__main__":
    GOLDEN.write_text(golden(), encoding="utf-8")
