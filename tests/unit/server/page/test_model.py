"""The page model agrees with the API, describes one instant, and can omit the names of VMs."""

import asyncio
from collections import Counter
from itertools import chain
from typing import Any

import msgspec
import pytest

from exporter.engine.evacuations.drain import OutcomeCount, take_snapshot
from exporter.engine.facts.model import (
    Fact,
    Instant,
    KubeVirtSettings,
    Node,
    Resource,
    Vmi,
)
from exporter.engine.facts.policy import Policy, Reason
from exporter.engine.facts.states import State
from exporter.engine.facts.trust import Trust
from exporter.health import Watched
from exporter.server.api.answers import EvacuationList
from exporter.server.api.evacuation_schemas import EvacuationAnswer
from exporter.server.api.handlers import Service
from exporter.server.page.model import PageModel, Vms, build_page
from exporter.server.page.tables import (
    ROWS,
    PageFilter,
    Sort,
    build_tables,
    read_filter,
    search_vms,
    summarize_blocked,
)
from exporter.tasks import complete
from tests.support.blocked import read
from tests.support.builders import NOW, a_running_state, a_vmi, a_vmim, an_evacuating_vmi
from tests.support.stores import put
from tests.support.stuck_vms import STUCK, put_stuck_vms
from tests.support.verdicts import decide
from tests.unit.server.api.test_handlers import ServedApi, a_health, cooling


POLICY = Policy()


def make_service(*facts: Fact, closing: bool = False, **overrides: Any) -> Service:
    """A service whose store has these facts; it may read every resource."""
    api = ServedApi(**overrides)
    put(api.store, *facts)
    api.service.closing = closing
    return api.service


def evacuating(name: str, *, age: float = 60.0, node: str = "n1", **overrides: Any) -> Vmi:
    """A VMI whose evacuation was requested `age` seconds ago, without a migration."""
    fields = {"name": name, "uid": f"uid-of-{name}", "eviction_strategy": "", **overrides}
    return an_evacuating_vmi(age=age, node=node, evacuation_node=node, **fields)


def busy_service(**overrides: Any) -> Service:
    """A service with three evacuations (one is stuck), cooldowns, a migration and idle VMs."""
    return make_service(
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
    service: Service,
    filters: PageFilter | None = None,
    *,
    now: Instant = NOW,
    named: bool = True,
) -> PageModel:
    """Build the page model; `named` says whether it has the names of single VMs."""
    filters = filters or PageFilter()
    blocked = asyncio.run(complete(summarize_blocked(read(service.blocked, None).entries, filters)))
    conditions = service.read_conditions(now)
    unsettled = service.view.read(now, conditions.trust).list_unsettled()
    snapshot = take_snapshot(service.store, conditions, unsettled)
    count = OutcomeCount(snapshot)
    searched = asyncio.run(complete(search_vms(service.store.vmis(), filters)))
    evacuations = EvacuationList(snapshot, service.health, reasons=service.store.reasons)
    for _ in chain(count, evacuations):
        pass
    described = evacuations.answer()
    forecasts = asyncio.run(service.forecast_nodes(count, {}))
    tables = build_tables(blocked, filters, described, forecasts, named=named)
    building = build_page(
        service,
        blocked,
        filters,
        now,
        described=described,
        tables=tables,
        searched=searched,
        named=named,
    )
    return asyncio.run(building)


def bad_day() -> Service:
    """A service with the VMs of `STUCK`."""
    service = make_service()
    put_stuck_vms(service.store)
    return service


async def evacuations_of(service: Service) -> list[EvacuationAnswer]:
    """The evacuations in the API."""
    return (await service.describe_evacuations(await service.take_snapshot())).evacuations


def vms_of(model: PageModel) -> Vms:
    """The model's tables of single VMs; fails if it has none."""
    assert model.vms is not None
    return model.vms


def evacuation_names(model: PageModel) -> list[str]:
    """The names of the VMs with an evacuation or a stuck move, in the page's order."""
    return [vmi.name for _, vmi in vms_of(model).moving.shown]


def blocked_names(model: PageModel) -> list[str]:
    """The names of the VMs in the table of blocked VMs, in its order."""
    return [vmi.name for _, vmi in vms_of(model).blocked.shown]


class TestTheSame:
    """The model has the same answers as the API at the same instant."""

    def test_evacuations_are_those_of_the_api(self) -> None:
        """The page lists the same evacuations as the API, in the same order."""
        service = busy_service()
        model = build_model(service)

        rows = vms_of(model).moving
        evacuations = asyncio.run(evacuations_of(service))
        assert [vmi.evacuation for _, vmi in rows.shown] == evacuations
        assert (rows.total, rows.matching, rows.more) == (3, 3, 0)
        assert (sum(step.count for step in model.steps), model.figures.stuck) == (3, 1)

    def test_a_vm_that_has_ended_is_counted_nowhere(self) -> None:
        """A VM that has ended is counted neither in the model nor in the status."""
        service = busy_service()
        before = build_model(service)
        put(service.store, evacuating("gone", node="n7", phase="Failed"))
        after = build_model(service)

        assert after.status.vmis == before.status.vmis
        assert after.steps == before.steps
        assert after.nodes == before.nodes

    def test_blocked_vms_are_the_blocked_set(self) -> None:
        """The table of blocked VMs lists the blocked set, with the API's explanation of each VM."""
        service = busy_service()
        model = build_model(service)

        rows = vms_of(model).blocked.shown
        assert (
            sorted((e for entries, _ in rows for e in entries), key=lambda e: (e.namespace, e.name))
            == read(service.blocked, None).entries
        )
        for _, vmi in rows:
            assert vmi == service.describe_vmi(vmi.namespace, vmi.name, NOW)

    def test_the_counts_are_those_of_the_verdicts(self) -> None:
        """Each VM is counted once, at its node and by its first reason."""
        service = busy_service()
        model = build_model(service)
        verdicts = [
            (evidence.vmi.node, decide(evidence, POLICY, NOW).reason)
            for evidence in service.store.all_evidence(Trust())
        ]

        assert model.status.vmis is not None
        assert model.status.vmis.known == len(verdicts)
        assert model.status.vmis.allowed == sum(reason is None for _, reason in verdicts)
        for node in model.nodes.shown:
            reasons = [reason for name, reason in verdicts if name == node.node]
            assert node.vmis == len(reasons)
            assert model.blocked_by.get(node.node, {}) == Counter(filter(None, reasons))
        blocked = [sum(model.blocked_by.get(node.node, {}).values()) for node in model.nodes.shown]
        assert blocked == sorted(blocked, reverse=True)


class TestFilters:
    """The filter and the sort order."""

    @pytest.mark.parametrize(
        ("filters", "evacuations", "blocked"),
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
    def test_a_filter_hides_the_other_rows(
        self, filters: PageFilter, evacuations: list[str] | None, blocked: list[str] | None
    ) -> None:
        """A filter hides the rows that do not match it; the total does not change."""
        model = build_model(busy_service(), filters)
        everything = build_model(busy_service())

        expected = evacuation_names(everything) if evacuations is None else evacuations
        assert evacuation_names(model) == expected
        assert blocked_names(model) == (blocked_names(everything) if blocked is None else blocked)
        assert vms_of(model).moving.total == 3
        assert vms_of(model).moving.matching == len(expected)

    @pytest.mark.parametrize(
        ("filters", "figures"),
        [
            pytest.param(PageFilter(), (10, 6, 4, 3, 1), id="everything"),
            pytest.param(PageFilter(namespace="bank"), (2, 1, 1, 1, 1), id="namespace"),
            pytest.param(PageFilter(vm="shop/rest"), (4, 4, 0, 0, 0), id="vm"),
            pytest.param(PageFilter(node="n1"), (7, 5, 2, 2, 0), id="node"),
            pytest.param(PageFilter(state=State.EXTERNAL), (10, 6, 4, 1, 0), id="state"),
            pytest.param(PageFilter(reason=Reason.COOLDOWN), (10, 6, 2, 3, 1), id="reason"),
        ],
    )
    def test_the_numbers_follow_the_filter(
        self, filters: PageFilter, figures: tuple[int, ...]
    ) -> None:
        """VMs, those that no rule blocks, blocked, evacuating and stuck, of those that match."""
        model = build_model(busy_service(), filters)

        assert msgspec.structs.astuple(model.figures) == figures

    @pytest.mark.parametrize(
        ("sort", "evacuations", "blocked"),
        [
            (Sort.TIME, ["old", "outside", "young"], ["soon", "late", "moving", "young"]),
            (Sort.NAME, ["old", "outside", "young"], ["late", "moving", "soon", "young"]),
            (Sort.NODE, ["old", "outside", "young"], ["soon", "young", "moving", "late"]),
            (Sort.STATE, ["old", "outside", "young"], ["soon", "late", "moving", "young"]),
        ],
    )
    def test_rows_are_sorted(self, sort: Sort, evacuations: list[str], blocked: list[str]) -> None:
        """Blocked VMs are in the order of `sort`; by time, the earliest release comes first.

        Evacuations with different next steps are in the order of the steps.
        """
        model = build_model(busy_service(), PageFilter(sort=sort))

        assert evacuation_names(model) == evacuations
        assert blocked_names(model) == blocked

    def test_a_node_is_found(self) -> None:
        """The filter by node also applies to the table of nodes."""
        model = build_model(busy_service(), PageFilter(node="n3"))

        assert [node.node for node in model.nodes.shown] == ["n3"]
        assert model.nodes.total == 3

    def test_a_whole_query_is_read(self) -> None:
        """Every key of the query is read."""
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
    def test_an_empty_query_is_no_filter(self, query: dict[str, str]) -> None:
        """Empty form fields filter nothing."""
        assert read_filter(query) == PageFilter()
        assert not read_filter(query).narrows

    @pytest.mark.parametrize(
        ("key", "value", "fault"),
        [
            ("namespace", "x" * 64, "namespace: at most 63 characters"),
            ("node", "x" * 254, "node: at most 253 characters"),
            ("state", "tired", "state: expected shutting_down or external or"),
            ("stuck", "yes", "stuck: expected true"),
            ("reason", "Cooldown", "reason: expected migration_in_progress or"),
            ("sort", "age", "sort: expected time or name or node or state"),
        ],
    )
    def test_what_makes_no_sense_is_named_and_ignored(
        self, key: str, value: str, fault: str
    ) -> None:
        """An invalid value is reported and ignored."""
        filters = read_filter({key: value})

        assert filters.ignored[0].startswith(fault)
        assert msgspec.structs.replace(filters, ignored=()) == PageFilter()


class TestSteps:
    """VMs with the same next step are together."""

    def test_stuck_vms_are_counted_by_next_step(self) -> None:
        """The steps of stuck VMs come first, then that of the most VMs; a user's move counts."""
        model = build_model(bad_day())

        assert {step.title: step.count for step in model.steps if step.stuck} == STUCK
        assert [step.title for step in model.steps] == [*STUCK, "wait"]
        assert model.figures.stuck == sum(STUCK.values()) == 30

    def test_a_step_is_that_of_the_api(self) -> None:
        """Each VM is with the step whose runbook and first words the API says."""
        for step, vmi in vms_of(build_model(bad_day())).moving.shown:
            one = vmi.evacuation or vmi.move
            assert one is not None
            assert (one.stuck, one.runbook) == (step.stuck, step.runbook)
            assert one.next_step.lower().startswith(step.title.lower())

    @pytest.mark.parametrize(
        ("sort", "first"),
        [
            (Sort.TIME, ["shop-frontend-0", "shop-frontend-11", "shop-frontend-10"]),
            (Sort.NAME, ["shop-frontend-0", "shop-frontend-1", "shop-frontend-10"]),
        ],
    )
    def test_rows_are_sorted_within_a_step(self, sort: Sort, first: list[str]) -> None:
        """Within a step the order is that of `sort`; by time, the longest comes first."""
        model = build_model(bad_day(), PageFilter(sort=sort))

        assert evacuation_names(model)[:3] == first

    def test_the_most_steps_are_bounded(self) -> None:
        """If each VM has a step of its own, the page has as many steps as a table has rows."""
        silent = [
            Node(name=f"n{n}", is_ready=False, is_silent=True, silent_since=NOW - 5000.0)
            for n in range(ROWS + 7)
        ]
        stuck = [evacuating(f"e{n}", node=f"n{n}", age=4000.0) for n in range(ROWS + 7)]
        model = build_model(make_service(KubeVirtSettings(), *silent, *stuck))

        assert len(model.steps) == ROWS
        assert model.figures.stuck == ROWS + 7


class TestBounds:
    """Tables have a bounded number of rows."""

    def test_a_table_counts_the_rows_that_it_hides(self) -> None:
        """A table shows a bounded number of rows, and counts the rows that it hides."""
        many = ROWS + 7
        model = build_model(
            make_service(
                *(evacuating(f"e{n:03}", node=f"n{n}", age=n) for n in range(many)),
                *(cooling(f"c{n:03}", node=f"n{n}", left=n + 1) for n in range(many)),
            )
        )

        tables = vms_of(model).moving, vms_of(model).blocked, model.nodes
        assert [len(table.shown) for table in tables] == [ROWS] * 3
        assert [table.more for table in tables] == [7] * 3
        assert evacuation_names(model)[0] == f"e{many - 1:03}"
        assert blocked_names(model)[0] == "c000"


class TestTrust:
    """Whether the page's data can be trusted."""

    def test_during_shutdown_there_are_no_rows(self) -> None:
        """During shutdown the model has no data of the cluster."""
        model = build_model(make_service(cooling("db1"), closing=True))

        assert model.closing
        assert not model.status.ready
        assert model.vms is None


class TestPrivacy:
    """What a listener without authentication shows."""

    @pytest.mark.parametrize("synced", [True, False])
    def test_no_name_is_on_the_page(self, synced: bool) -> None:
        """The page has no name and no namespace of a VM."""
        health = a_health(
            Watched(Resource.VMIS, "secret-ns", synced=synced, contact=NOW),
            Watched(Resource.PODS, "secret-ns", rejected="no pods in secret-ns"),
            Watched(Resource.VMIMS, "secret-ns", synced=True, trouble="cut in secret-ns"),
        )
        vmis = (
            cooling("secret-1", namespace="secret-ns"),
            evacuating("secret-2", namespace="secret-ns"),
        )
        service = make_service(*vmis, health=health)
        model = build_model(service, named=False)

        assert b"secret" not in msgspec.json.encode(model)
        assert b"secret" in msgspec.json.encode(build_model(service))
        assert [row.resource for row in model.status.resources if row.rejected] == [Resource.PODS]
        assert bool(model.status.waiting_for) is not synced
        assert (model.nodes.total > 0) is synced

    def test_the_numbers_are_the_same(self) -> None:
        """The counts are the same with and without names."""
        named, unnamed = (build_model(busy_service(), named=named) for named in (True, False))

        assert unnamed == msgspec.structs.replace(named, vms=None)

    def test_a_filter_finds_out_nothing(self) -> None:
        """On a page without VM names, a filter by namespace, state or reason changes no count."""
        filters = PageFilter(
            namespace="bank", state=State.EXTERNAL, reason=Reason.COOLDOWN, stuck=True
        )
        asked = build_model(busy_service(), filters, named=False)

        assert msgspec.structs.replace(asked, filters=PageFilter()) == build_model(
            busy_service(), named=False
        )


def test_stuck_moves_are_listed() -> None:
    """A stuck move is listed, unless it is filtered out; a move that is not stuck is not."""
    service = make_service(
        KubeVirtSettings(),
        a_vmi(name="hung", uid="uid-of-hung", migratable=True),
        a_vmim(name="mig-hung", uid="m-hung", vmi_name="hung", created=NOW - 86_400.0),
        a_vmi(name="young", uid="uid-of-young", migratable=True),
        a_vmim(name="mig-young", uid="m-young", vmi_name="young", created=NOW - 10.0),
    )
    every, none = (build_model(service, PageFilter(node=node)) for node in ("", "n9"))

    assert evacuation_names(every) == ["hung"]
    assert not evacuation_names(none)
