"""What the page says: the same as the API, of one instant, and no more than may be told."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from exporter.counters import HeldEvictions
from exporter.engine.diagnosis import State
from exporter.engine.drain import DrainOutcome, forecast_node, read_conditions
from exporter.engine.model import (
    ALL_ALIVE,
    CLUSTER_RESOURCES,
    Fact,
    Instant,
    KubeVirtSettings,
    Policy,
    Reason,
    Resource,
    StuckPolicy,
    Vmi,
)
from exporter.engine.rules import decide
from exporter.health import CheckpointFault, CheckpointHealth, Health, Staleness, Watched
from exporter.server.answers import (
    describe_drain,
    describe_status,
    explain_vmi,
    list_evacuations,
)
from exporter.server.blocked import BlockedSet
from exporter.server.page.model import (
    LOSSES,
    ROWS,
    PageFilter,
    PageInputs,
    PageModel,
    Sort,
    build_page,
    read_filter,
)
from exporter.text import to_datetime
from tests.support.blocked import read
from tests.support.builders import NOW, a_running_state, a_state, a_store, a_vmi, a_vmim


POLICY = Policy()
RUNBOOK = Path(__file__).parents[4] / "alerts/runbooks/KubeVirtEvictionExporterBlindSpot.md"


def a_health(*watched: Watched) -> Health:
    """Everything synced and heard of now, unless other watches are given."""
    return Health(
        180.0,
        600.0,
        list(watched) or [Watched(r, None, synced=True, contact=NOW) for r in CLUSTER_RESOURCES],
    )


def make_inputs(*facts: Fact, now: Instant = NOW, **overrides: Any) -> PageInputs:
    """A cluster of these facts, everything of it to be seen."""
    store = a_store(*facts, read_at=NOW)
    fields: dict[str, Any] = {
        "store": store,
        "health": a_health(),
        "policy": POLICY,
        "stuck": StuckPolicy(),
        "held_evictions": HeldEvictions(),
    } | overrides
    blocked = BlockedSet(store, fields["health"], fields["policy"], lambda: now)
    return PageInputs(**{"blocked": read(blocked, None).entries, **fields})


def cooling(name: str, *, left: float = 300.0, **overrides: Any) -> Vmi:
    """A VMI of which the cooldown of 15 minutes is over after `left` seconds."""
    end = NOW + left - 900.0
    fields = {"name": name, "uid": f"uid-of-{name}", **overrides}
    return a_vmi(migration=a_state(uid=f"m-of-{name}", start=end - 60.0, end=end), **fields)


def evacuating(name: str, *, age: float = 60.0, **overrides: Any) -> Vmi:
    """A VMI that is to leave its node since `age` seconds; it has not been moved yet."""
    fields: dict[str, Any] = {
        "name": name,
        "uid": f"uid-of-{name}",
        "evacuation_node": overrides.get("node", "n1"),
        "eviction_requested_at": NOW - age,
        "migratable": True,
    }
    return a_vmi(**(fields | overrides))


def busy_inputs(**overrides: Any) -> PageInputs:
    """Evacuations of three states, one of them stuck; cooldowns; a migration; VMs at rest."""
    return make_inputs(
        KubeVirtSettings(),
        evacuating("old", age=4000.0, migratable=False, namespace="bank", node="n2"),
        evacuating("outside", age=50.0, eviction_strategy="External", namespace="lab"),
        evacuating("young", age=20.0),
        a_vmim(name="mig-young", uid="m-young", vmi_name="young", created=NOW - 10),
        cooling("soon", left=10.0),
        cooling("late", left=800.0, namespace="bank", node="n3"),
        a_vmi(name="moving", uid="uid-of-moving", migration=a_running_state(), node="n2"),
        *(a_vmi(name=f"rest-{n}", uid=f"rest-{n}", node="n1") for n in range(4)),
        **overrides,
    )


def build_model(
    inputs: PageInputs, filters: PageFilter | None = None, *, now: Instant = NOW
) -> PageModel:
    """The page model with single VMs."""
    return build_page(inputs, filters or PageFilter(), now, named=True)


def evacuation_names(model: PageModel) -> list[str]:
    """The VMs in the table of evacuations, as shown."""
    assert model.cluster is not None
    assert model.cluster.vms is not None
    return [vmi.name for vmi in model.cluster.vms.evacuations.shown]


def held_names(model: PageModel) -> list[str]:
    """The VMs in the table of held VMs, as shown."""
    assert model.cluster is not None
    assert model.cluster.vms is not None
    return [row.vmi.name for row in model.cluster.vms.held.shown]


class TestTheSame:
    """What the model says is what the API says at that instant."""

    def test_evacuations_are_those_of_the_api(self) -> None:
        """Every row of evacuations is the API's answer, in the API's order."""
        inputs = busy_inputs()
        model = build_model(inputs)
        told = list_evacuations(
            inputs.store.evacuating(),
            inputs.stuck,
            inputs.store.load(),
            NOW,
            inputs.health,
            reasons=inputs.store.reasons,
        )

        assert model.cluster is not None
        assert model.cluster.vms is not None
        rows = model.cluster.vms.evacuations
        assert [vmi.evacuation for vmi in rows.shown] == told.evacuations
        assert (rows.total, rows.matching, rows.more) == (3, 3, 0)
        assert (model.cluster.evacuating, model.cluster.stuck) == (3, 1)
        assert sum(model.cluster.states.values()) == 3

    def test_a_vm_that_has_ended_is_counted_nowhere(self) -> None:
        """Neither the model nor the status takes it for one that no rule holds."""
        inputs = busy_inputs()
        before = build_model(inputs)
        inputs.store.put(evacuating("gone", node="n7", phase="Failed"))
        after = build_model(inputs)

        assert before.cluster is not None
        assert after.cluster is not None
        assert after.cluster.vmis == before.cluster.vmis
        assert after.cluster.free == before.cluster.free
        assert after.cluster.evacuating == before.cluster.evacuating
        assert after.cluster.nodes == before.cluster.nodes

    def test_held_vms_are_the_blocked_set(self) -> None:
        """The entries of the rows are the blocked set, each beside what the API explains of it."""
        inputs = busy_inputs()
        model = build_model(inputs)

        assert model.cluster is not None
        assert model.cluster.vms is not None
        rows = model.cluster.vms.held.shown
        assert sorted((e.namespace, e.name, e.checkpoint) for row in rows for e in row.entries) == [
            (e.namespace, e.name, e.checkpoint) for e in inputs.blocked
        ]
        for row in rows:
            evidence = inputs.store.evidence(row.vmi.namespace, row.vmi.name)
            assert evidence is not None
            load = inputs.store.load()
            assert row.vmi == explain_vmi(
                evidence,
                POLICY,
                inputs.stuck,
                load=load,
                now=NOW,
                health=inputs.health,
                kubevirt=inputs.store.kubevirt,
            )

    def test_its_health_is_that_of_the_status(self) -> None:
        """Readiness, staleness and contact are GET /v1/status's."""
        inputs = busy_inputs()
        shown = build_model(inputs, now=NOW + 200).status
        status = describe_status(
            inputs.health, vmis=len(inputs.store), drain={}, held={}, now=NOW + 200
        )

        assert (shown.ready, shown.staleness) == (status.ready, Staleness.STALE)
        assert (shown.as_of, shown.observed_at) == (status.as_of, status.observed_at)
        assert (shown.version, shown.checkpoint) == (status.version, status.checkpoint)

    def test_the_counts_are_those_of_the_verdicts(self) -> None:
        """Each VM counts once, at its node, by the reason of both checkpoints asked at once."""
        inputs = busy_inputs()
        model = build_model(inputs)
        verdicts = [
            (evidence.vmi.node, decide(evidence, POLICY, NOW).reason)
            for evidence in inputs.store.all_evidence()
        ]

        assert model.cluster is not None
        assert model.cluster.vmis == len(verdicts)
        assert model.cluster.free == sum(reason is None for _, reason in verdicts)
        for node in model.cluster.nodes.shown:
            reasons = [reason for name, reason in verdicts if name == node.name]
            assert node.vmis == len(reasons)
            assert node.free == reasons.count(None)
            assert node.held_by == {reason: reasons.count(reason) for reason in Reason}
        held = [node.held for node in model.cluster.nodes.shown]
        assert held == sorted(held, reverse=True)

    def test_the_drain_of_a_node_is_the_api_s(self) -> None:
        """The counts of each node, and of the one that is filtered every VM."""
        inputs = busy_inputs()
        model = build_page(inputs, PageFilter(node="n2"), NOW, named=True)
        (node,) = model.cluster.nodes.shown if model.cluster else ()
        conditions = read_conditions(inputs.store, inputs.stuck, ALL_ALIVE, NOW)
        forecast, candidates = forecast_node(inputs.store, "n2", conditions)
        drain = describe_drain(forecast, candidates, NOW, inputs.health)

        assert model.cluster is not None
        assert model.cluster.drained == drain
        assert node.drain == {one: getattr(drain, one) for one in DrainOutcome}
        assert sum(model.cluster.drain.values()) == model.cluster.vmis
        assert build_model(inputs).cluster != model.cluster


class TestFilters:
    """Filters and sorts."""

    @pytest.mark.parametrize(
        ("filters", "evacuations", "held"),
        [
            pytest.param(PageFilter(), ["old", "outside", "young"], None, id="everything"),
            pytest.param(PageFilter(namespace="bank"), ["old"], ["late"], id="namespace"),
            pytest.param(PageFilter(vm="nk/ol"), ["old"], [], id="vm"),
            pytest.param(PageFilter(node="n2"), ["old"], ["moving"], id="node"),
            pytest.param(PageFilter(state=State.EXTERNAL), ["outside"], None, id="state"),
            pytest.param(PageFilter(stuck=True), ["old"], None, id="stuck"),
            pytest.param(PageFilter(reason=Reason.COOLDOWN), None, ["soon", "late"], id="reason"),
            pytest.param(PageFilter(namespace="nowhere"), [], [], id="nothing"),
        ],
    )
    def test_it_shows_what_is_wished(
        self, filters: PageFilter, evacuations: list[str] | None, held: list[str] | None
    ) -> None:
        """Each filter leaves out the others, and says of how many."""
        model = build_model(busy_inputs(), filters)
        everything = build_model(busy_inputs())

        expected = evacuation_names(everything) if evacuations is None else evacuations
        assert evacuation_names(model) == expected
        assert held_names(model) == (held_names(everything) if held is None else held)
        assert model.cluster is not None
        assert model.cluster.vms is not None
        assert model.cluster.vms.evacuations.total == 3
        assert model.cluster.vms.evacuations.matching == len(expected)

    @pytest.mark.parametrize(
        ("sort", "evacuations", "held"),
        [
            (Sort.TIME, ["old", "outside", "young"], ["soon", "late", "moving", "young"]),
            (Sort.NAME, ["old", "outside", "young"], ["late", "moving", "soon", "young"]),
            (Sort.NODE, ["outside", "young", "old"], ["soon", "young", "moving", "late"]),
            (Sort.STATE, ["outside", "old", "young"], ["soon", "late", "moving", "young"]),
        ],
    )
    def test_it_sorts_as_wished(self, sort: Sort, evacuations: list[str], held: list[str]) -> None:
        """By time: the longest evacuation first, the soonest release first, no release last."""
        model = build_model(busy_inputs(), PageFilter(sort=sort))

        assert evacuation_names(model) == evacuations
        assert held_names(model) == held

    def test_a_node_is_found(self) -> None:
        """The filter by node is for the table of nodes too."""
        model = build_model(busy_inputs(), PageFilter(node="n3"))

        assert model.cluster is not None
        assert [node.name for node in model.cluster.nodes.shown] == ["n3"]
        assert model.cluster.nodes.total == 3

    def test_a_whole_query_is_read(self) -> None:
        """Every key has its place."""
        filters = read_filter(
            {
                "namespace": " shop ",
                "node": "n1",
                "state": "backoff",
                "stuck": "true",
                "reason": "cooldown",
                "sort": "node",
            }
        )

        assert filters == PageFilter(
            namespace="shop",
            node="n1",
            state=State.BACKOFF,
            stuck=True,
            reason=Reason.COOLDOWN,
            sort=Sort.NODE,
        )
        assert filters.narrows

    @pytest.mark.parametrize("query", [{}, dict.fromkeys(("namespace", "state", "sort"), "")])
    def test_an_empty_query_wishes_nothing(self, query: dict[str, str]) -> None:
        """What a form sends of fields that were left empty is nothing."""
        assert read_filter(query) == PageFilter()
        assert not read_filter(query).narrows

    @pytest.mark.parametrize(
        ("key", "value", "told"),
        [
            ("namespace", "x" * 64, "namespace: at most 63 characters"),
            ("node", "x" * 254, "node: at most 253 characters"),
            ("state", "tired", "state: expected external or stale_marker or"),
            ("stuck", "yes", "stuck: expected true"),
            ("reason", "Cooldown", "reason: expected migration_in_progress or"),
            ("sort", "age", "sort: expected time or name or node or state"),
        ],
    )
    def test_what_makes_no_sense_is_named_and_ignored(
        self, key: str, value: str, told: str
    ) -> None:
        """A wrong value says what was expected, and does not spoil the others."""
        filters = read_filter({key: value})

        assert filters.ignored[0].startswith(told)
        assert msgspec.structs.replace(filters, ignored=()) == PageFilter()


class TestBounds:
    """However much there is, a page is a page."""

    def test_a_table_has_so_many_rows_and_says_how_many_more(self) -> None:
        """Of more evacuations, held VMs and nodes than a table takes, the others are counted."""
        many = ROWS + 7
        model = build_model(
            make_inputs(
                *(evacuating(f"e{n:03}", node=f"n{n}", age=n) for n in range(many)),
                *(cooling(f"c{n:03}", node=f"n{n}", left=n + 1) for n in range(many)),
            )
        )

        assert model.cluster is not None
        assert model.cluster.vms is not None
        tables = model.cluster.vms.evacuations, model.cluster.vms.held, model.cluster.nodes
        assert [len(table.shown) for table in tables] == [ROWS] * 3
        assert [table.more for table in tables] == [7] * 3
        assert evacuation_names(model)[0] == f"e{many - 1:03}"
        assert held_names(model)[0] == "c000"


class TestTrust:
    """Whether what is told can be trusted."""

    def test_nothing_is_told_of_the_cluster_before_it_is_synced(self) -> None:
        """Where the API answers 503 the model says what it waits for, and nothing else."""
        waiting = [Watched(r, None) for r in CLUSTER_RESOURCES]
        waiting[0].synced = True
        model = build_model(make_inputs(cooling("db1"), health=a_health(*waiting)))

        assert not model.status.ready
        assert model.status.waiting_for == tuple(CLUSTER_RESOURCES[1:])
        assert model.cluster is None

    def test_nothing_is_told_of_the_cluster_at_the_end(self) -> None:
        """A process that is ending says so, as the API does."""
        model = build_model(make_inputs(cooling("db1"), closing=True))

        assert model.status.closing
        assert model.cluster is None

    def test_it_is_told_when_trust_turns(self) -> None:
        """The instant at which silence would make it less trustworthy."""
        assert build_model(make_inputs()).status.dies_at == to_datetime(NOW + 780)
        assert build_model(make_inputs(), now=NOW + 200).status.dies_at == to_datetime(NOW + 780)
        assert build_model(make_inputs(), now=NOW + 800).status.staleness is Staleness.DEAD

    def test_a_missing_permission_says_what_is_lost(self) -> None:
        """A refused resource is a loss, with the reasons by place."""
        health = a_health(
            Watched(Resource.VMIS, "shop", synced=True, contact=NOW),
            Watched(Resource.VMIS, "bank", synced=True, contact=NOW - 5),
            Watched(Resource.PODS, "shop", refused="403 no"),
            Watched(Resource.PODS, "bank", synced=True, contact=NOW, trouble="slow"),
        )
        (loss,) = build_model(make_inputs(health=health)).status.losses
        vmis, pods = build_model(make_inputs(health=health)).status.watching

        assert (loss.resource, loss.lost) == (Resource.PODS, LOSSES[Resource.PODS])
        assert loss.why == {"shop": "403 no"}
        assert (vmis.places, vmis.synced, vmis.contact_at) == (2, 2, to_datetime(NOW - 5))
        assert (pods.places, pods.synced, pods.refused, pods.trouble) == (2, 1, 1, "slow")

    def test_the_losses_are_those_of_the_runbook(self) -> None:
        """Page and runbook tell the same of each resource that is watched."""
        row = re.compile(r"^\| `(\w+)` \| (.+?)(?:, see .*)? \|$", re.MULTILINE)
        rows = row.findall(RUNBOOK.read_text(encoding="utf-8"))
        told = {Resource(name): lost.replace("`", "") for name, lost in rows}

        assert told.items() <= LOSSES.items()
        assert set(LOSSES) == set(Resource)
        assert set(told) == {*CLUSTER_RESOURCES, Resource.CONFIGMAPS}

    @pytest.mark.parametrize(
        ("further", "shared"),
        [
            pytest.param([], False, id="file"),
            pytest.param([Watched(Resource.CONFIGMAPS, "ns", synced=True)], True, id="configmaps"),
        ],
    )
    def test_it_tells_how_the_checkpoint_is_kept(
        self, further: list[Watched], shared: bool
    ) -> None:
        """Where it is, who writes it, what is not written and what went wrong."""
        health = a_health()
        health.watched += further
        kept = CheckpointHealth(
            may_write=lambda: True, find_unwritten=lambda: NOW - 30, vmis=3, size=300
        )
        kept.faults[CheckpointFault.CONFLICT] += 2
        health.checkpoint = kept
        status = build_model(make_inputs(health=health)).status

        assert status.shared is shared
        assert status.checkpoint is not None
        assert status.checkpoint.writes
        assert status.checkpoint.unwritten_since == to_datetime(NOW - 30)
        assert status.checkpoint.faults == {CheckpointFault.CONFLICT: 2}


class TestPrivacy:
    """What a listener may tell that asks nobody who they are."""

    @pytest.mark.parametrize("synced", [True, False])
    def test_no_name_is_on_the_board(self, synced: bool) -> None:
        """No name and no namespace of a VM, in whatever state: numbers and nodes only."""
        health = a_health(
            Watched(Resource.VMIS, "secret-ns", synced=synced, contact=NOW),
            Watched(Resource.PODS, "secret-ns", refused="no pods in secret-ns"),
            Watched(Resource.VMIMS, "secret-ns", synced=True, trouble="cut in secret-ns"),
        )
        vmis = (
            cooling("secret-1", namespace="secret-ns"),
            evacuating("secret-2", namespace="secret-ns"),
        )
        model = build_page(make_inputs(*vmis, health=health), PageFilter(), NOW, named=False)

        assert b"secret" not in msgspec.json.encode(model)
        assert b"secret" in msgspec.json.encode(build_model(make_inputs(*vmis, health=health)))
        assert [loss.resource for loss in model.status.losses] == [Resource.PODS]
        assert bool(model.status.waiting_for) is not synced
        assert (model.cluster is not None) is synced

    def test_the_numbers_are_the_same(self) -> None:
        """What is counted does not depend on what may be named."""
        named = build_model(busy_inputs()).cluster
        unnamed = build_page(busy_inputs(), PageFilter(), NOW, named=False).cluster

        assert named is not None
        assert unnamed == msgspec.structs.replace(named, vms=None)

    def test_a_filter_finds_out_nothing(self) -> None:
        """Asking for a namespace, a state or a reason changes no number."""
        filters = PageFilter(
            namespace="bank", state=State.EXTERNAL, reason=Reason.COOLDOWN, stuck=True
        )
        asked = build_page(busy_inputs(), filters, NOW, named=False).cluster

        assert asked == build_page(busy_inputs(), PageFilter(), NOW, named=False).cluster


def test_a_board_is_for_one_instant() -> None:
    """What the scene's store hears later does not change a model that is there."""
    inputs = busy_inputs()
    model = build_model(inputs)
    before = msgspec.json.encode(model)
    inputs.store.put(cooling("soon", node="n9"))
    inputs.health.watched[0].synced = False

    assert msgspec.json.encode(model) == before
