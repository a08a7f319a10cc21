"""The page model: everything the status page shows at one instant.

The model consists of the API's answers. Its counts are those of one instant, and a VM has the same
answer in each table, so that no row contradicts another row or the API.
"""

from collections import Counter
from datetime import datetime

from msgspec import Struct, structs

from exporter.engine.facts.model import Instant, Resource
from exporter.engine.facts.policy import Policy, Reason, StuckPolicy
from exporter.server.api.evacuation_schemas import (
    DrainAnswer,
    EvacuationAnswer,
    EvacuationsAnswer,
    NodeAnswer,
)
from exporter.server.api.handlers import Service
from exporter.server.api.schemas import BlockedVmi, StatusAnswer, VmiAnswer
from exporter.server.page.tables import (
    ROWS,
    BlockedVms,
    FoundVms,
    Moving,
    PageFilter,
    PageTables,
    Rows,
    Step,
    choose_counted,
    list_moving,
    name_vm,
)
from exporter.text import to_optional_datetime


HINTS = 200
"""The most suggestions of a filter field."""


class Vms(Struct, frozen=True, kw_only=True, weakref=True):
    """The tables of single VMs, and the namespaces to suggest in the filter.

    `moving` has the VMs with an evacuation or a stuck move, in the order of their next steps.
    `blocked` has each VM with its entries in the blocked set. `found` has the VMs whose
    namespace/name contains the filter's `vm`; it is None if that filter is empty.
    """

    found: Rows[VmiAnswer] | None
    moving: Rows[tuple[Step, VmiAnswer]]
    blocked: Rows[tuple[tuple[BlockedVmi, ...], VmiAnswer]]
    namespaces: tuple[str, ...]


class Figures(Struct, frozen=True, kw_only=True):
    """How many VMs match the filter: all, those that no rule blocks, and the others.

    `stuck` counts evacuations and other moves.
    The filter's `state`, `stuck` and `reason` narrow only the figures that they are about.
    """

    vmis: int = 0
    free: int = 0
    blocked: int = 0
    evacuating: int = 0
    stuck: int = 0


class PageModel(Struct, frozen=True, kw_only=True, weakref=True):
    """Everything that the page shows. Fields with a default are set only if `status.ready`.

    - `objects`: the number of objects of each resource.
    - `dies_at`: when `status.staleness` becomes DEAD if there is no contact until then.
    - `closing`: this process is shutting down.
    - `steps`: the first next steps, those of stuck VMs first, and then those of the most VMs.
    - `blocked_by`: the number of blocked VMs by node and by their first reason.
    - `drained`: the drain of the filter's node, if the page may name VMs.
    - `vms`: None if the page may not name VMs.
    """

    status: StatusAnswer
    objects: dict[Resource, int]
    dies_at: datetime | None
    closing: bool
    policy: Policy
    stuck: StuckPolicy
    filters: PageFilter
    steps: tuple[Step, ...] = ()
    figures: Figures = Figures()
    nodes: Rows[NodeAnswer] = Rows(shown=(), matching=0, total=0)
    node_names: tuple[str, ...] = ()
    blocked_by: dict[str, Counter[Reason]] = {}
    drained: DrainAnswer | None = None
    vms: Vms | None = None


async def build_page(
    service: Service,
    blocked: BlockedVms,
    filters: PageFilter,
    now: Instant,
    *,
    described: EvacuationsAnswer,
    tables: PageTables,
    searched: FoundVms,
    named: bool,
) -> PageModel:
    """Build the page model at `now`; it names single VMs only if `named`.

    `blocked` and `tables` are the results of `summarize_blocked` and `build_tables` with these
    filters. `searched` is the result of `search_vms` if the filters name VMs or a namespace. Other
    tasks run between the descriptions of single VMs.
    """
    outcomes, nodes, moving = tables
    status = service.describe_status(blocked.reasons, outcomes, now)
    shown = status
    if not named:
        # Omit namespaces. Omit errors too, because an error may name a namespace.
        waiting = dict.fromkeys(
            row.resource for row in status.resources if not (row.synced or row.rejected)
        )
        shown = structs.replace(
            status,
            waiting_for=list(waiting or status.waiting_for),
            resources=[
                structs.replace(
                    row,
                    namespace=None,
                    rejected=row.rejected and "see the log",
                    trouble=row.trouble and "failing: see the log",
                )
                for row in status.resources
            ],
            blind_spots={},
        )
    page = PageModel(
        status=shown,
        objects={row.resource: service.store.count(row.resource) for row in status.resources},
        dies_at=to_optional_datetime(service.health.dies_at(now)),
        closing=service.closing,
        policy=service.policy,
        stuck=service.stuck,
        filters=filters,
    )
    if not status.ready:
        return page
    counted = choose_counted(filters, named=named)
    placed = blocked.placed if named else blocked.rows.total
    held = blocked.rows.matching if named else blocked.rows.total
    vmis = service.store.nodes[counted.node] if counted.node else service.store.nodes.total()
    if counted.vm or counted.namespace:
        vmis = searched.matching
    return structs.replace(
        page,
        steps=tuple(dict.fromkeys(step for step, _ in moving))[:ROWS],
        figures=Figures(
            vmis=vmis,
            free=vmis - placed,
            blocked=held,
            evacuating=sum(isinstance(move, EvacuationAnswer) for _, move in moving),
            stuck=sum(move.stuck for _, move in moving),
        ),
        nodes=Rows(shown=tuple(nodes[:ROWS]), matching=len(nodes), total=len(outcomes)),
        node_names=tuple(outcomes)[:HINTS],
        blocked_by=blocked.by_node,
        drained=_describe_drain(service, filters.node, now) if named and filters.node else None,
        vms=await _list_vms(
            service, blocked, filters, moving=moving, described=described, searched=searched
        )
        if named
        else None,
    )


def _describe_drain(service: Service, node: str, now: Instant) -> DrainAnswer | None:
    """The drain of a node; None if neither a VM nor a pod that has outlived its move is on it."""
    answer = service.describe_node(node, now)
    return answer if answer.vmis or answer.outlived else None


async def _list_vms(
    service: Service,
    blocked: BlockedVms,
    filters: PageFilter,
    *,
    moving: list[tuple[Step, Moving]],
    described: EvacuationsAnswer,
    searched: FoundVms,
) -> Vms:
    every = list_moving(described)
    steps = {name_vm(move): step for step, move in moving[:ROWS]}
    named = searched.first if filters.vm else ()
    blocks = [entries[0] for entries in blocked.rows.shown]
    keys = [
        *named,
        *steps,
        *map(name_vm, blocks),
    ]
    answers = await service.describe_vmis(dict.fromkeys(keys))
    found = None
    if filters.vm:
        found = Rows(
            shown=tuple(answers[key] for key in named if key in answers),
            matching=searched.named,
            total=service.store.count(Resource.VMIS),
        )
    return Vms(
        found=found,
        moving=Rows(
            shown=tuple(
                (step, answers[key])
                for key, step in steps.items()
                if key in answers and (answers[key].evacuation or answers[key].move) is not None
            ),
            matching=len(moving),
            total=len(every),
        ),
        blocked=Rows(
            shown=tuple(
                (entries, answers[key])
                for entries in blocked.rows.shown
                if (key := name_vm(entries[0])) in answers
            ),
            matching=blocked.rows.matching,
            total=blocked.rows.total,
        ),
        namespaces=tuple(sorted({move.namespace for move in every} | blocked.namespaces)[:HINTS]),
    )
