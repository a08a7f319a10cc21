"""The trends of days and weeks: what nobody needs on a bad day."""

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Panel

from dashboards.looks import (
    GREEN,
    PER_MINUTE,
    RED,
    YELLOW,
    Column,
    heatmap_panel,
    stat_panel,
    table_panel,
    time_panel,
)
from dashboards.queries import (
    BLOCKS,
    COOLDOWNS,
    DAY,
    MONTH,
    POLICY,
    RANGE,
    RATE,
    REQUESTS,
    VM,
    VMIS,
    count_within,
    each,
    each_vm,
    increase,
    link_to_vm,
    of_endpoints,
    of_node,
    rate,
    rate_other,
    rename,
    select,
    select_by,
)


Section = Sequence[Builder[Panel]]

TARGET = 0.99
"""The share of evacuations that end within 30 minutes (the SLO)."""
VERDICTS = "kubevirt_eviction_exporter_verdicts_total"
PREVENTED = "kubevirt_eviction_exporter_moves_prevented_total"
PREVENTED_SECONDS = "kubevirt_eviction_exporter_prevented_migration_seconds_total"


def sections(vm_uid: str) -> Mapping[str, Section]:
    """The sections by their title. Each VM links to the dashboard `vm_uid`."""
    return {
        "Evacuations and drains": _evacuations(),
        "Repeated migrations": _churn(link_to_vm(vm_uid)),
        "Blocked evictions": _blocked(),
        "Load": _load(),
    }


def _evacuations() -> Section:
    def ended(name: str, within: str) -> str:
        recorded = f"source:kubevirt_eviction_exporter_evacuations_{name}:rate5m"
        return each(("source",), count_within(within, recorded), "sum")

    in_time = f"{ended('in_time', MONTH)} / ({ended('succeeded', MONTH)} > 0)"
    drains = count_within(MONTH, "cluster:kubevirt_eviction_exporter_drains:rate5m")
    migrations = count_within(DAY, "cluster:kubevirt_eviction_exporter_migrations:rate5m")
    return [
        table_panel(
            "SLO: 99 % of evacuations within 30 minutes",
            "Evacuations of the last 28 days, by who requested them. Only those that succeeded "
            "count: one that is stuck has its own alerts. Budget left is the share of the 1 % "
            "that may still take longer. Red: the promise is broken. Find the day in the next "
            "panel, and run `python -m exporter explain NAMESPACE/NAME` for a VM of that day: it "
            "says how long each phase took. This table needs the recording rules of alerts/.",
            [
                Column("Evacuations", f"round({ended('succeeded', MONTH)}) > 0"),
                Column(
                    "Within 30 minutes",
                    in_time,
                    unit=units.PercentUnit,
                    steps=((None, RED), (TARGET, GREEN)),
                ),
                Column(
                    "Budget left",
                    f"1 - (1 - {in_time}) / {1 - TARGET:g}",
                    unit=units.PercentUnit,
                    steps=((None, RED), (0, YELLOW), (0.25, GREEN)),
                ),
            ],
            size=(12, 7),
            labels={"source": "Source"},
            sort_by="Evacuations",
        ),
        time_panel(
            "Evacuations that took at most 30 minutes",
            "The share of the evacuations that succeeded within the day before each point, by who "
            "requested them. This panel needs the recording rules of alerts/.",
            {"{{source}}": f"{ended('in_time', DAY)} / ({ended('succeeded', DAY)} > 0)"},
            size=(12, 7),
            unit=units.PercentUnit,
            axis="share of the evacuations",
            most=1,
        ),
        stat_panel(
            "Drains of the last 28 days",
            "Drains of nodes that ended, by how they ended; 'cancelled' means that the node became "
            "schedulable again before it was empty. This panel needs the recording rules of "
            "alerts/.",
            {"{{outcome}}": f"round({each(('outcome',), drains)})"},
            size=(12, 7),
            unit=units.Short,
        ),
        time_panel(
            "Migrations per day",
            "Each point shows the migrations that ended within the day before it, by outcome. With "
            "the recording rules of alerts/, a time range of months loads fast.",
            {"{{outcome}}": each(("outcome",), migrations, "sum")},
            size=(12, 7),
            unit=units.Short,
            axis="migrations per day",
        ),
    ]


def _churn(url: str) -> Section:
    """Panels that show whether the same VMs are moved again and again."""
    cap = select(POLICY, 'setting="max_migration_cooldown"')
    floor = select(POLICY, 'setting="migration_cooldown"')
    cooling = each_vm("kubevirt_vmi_eviction_cooldown_seconds", by=(*VM, "policy"))
    is_above = f"{each(('policy',), cap)} > {each(('policy',), floor)}"
    moved = each_vm("kubevirt_vmi_migrations_in_window")
    at_the_cap = (
        f"{cooling} == on (cluster, policy) group_left () ({is_above})"
        f" and on (cluster, namespace, name) {moved} > 1"
    )
    in_cooldown, all_vms = (
        each((), each(("verdict", "node"), select_by("node", VMIS, *verdict)), "sum")
        for verdict in (('verdict="cooldown"',), ())
    )
    return [
        table_panel(
            "Top churners",
            "The ten VMs with the most migrations inside migrationHistoryWindow. If one VM leads "
            "again and again, find out who moves it: the page of the VM names the requester of "
            "each migration.",
            [Column("Migrations", f"topk(10, {moved})")],
            size=(9, 9),
            labels={"namespace": "Namespace", "name": "VM"},
            sort_by="Migrations",
            links={"VM": ("Show this VM", url)},
        ),
        stat_panel(
            "VMs at the maximum cooldown",
            "VMs that were migrated so often that their cooldown is maxMigrationCooldown. Yellow: "
            "see who they are in the table at the left.",
            {"": each((), at_the_cap, "count")},
            size=(6, 9),
            unit=units.Short,
            steps=((None, GREEN), (1, YELLOW)),
            none="0",
        ),
        time_panel(
            "Time in cooldown",
            "The share of the VMs that are in cooldown. An average of 5 % means that each VM "
            "spends 72 minutes of a day in cooldown. If the share is large, the descheduler has "
            "few VMs to choose from: compare other settings with `python -m exporter replay`.",
            {"in cooldown": f"{in_cooldown} / {all_vms}"},
            size=(9, 9),
            unit=units.PercentUnit,
            axis="share of the VMs",
        ),
    ]


def _blocked() -> Section:
    rates = select_by("namespace", BLOCKS, range_function=f"rate({{}}[{RATE}])")
    requests = each(("endpoint",), of_endpoints(f"{REQUESTS}_count", "verdicts|blocked.*"), "sum")
    denied, answered = (
        each(("checkpoint",), rate(VERDICTS, *allowed), "sum")
        for allowed in (('allowed="false"',), ())
    )
    increases = (
        select_by("namespace", metric, range_function=f"increase({{}}[{RANGE}])")
        for metric in (PREVENTED, PREVENTED_SECONDS)
    )
    prevented, seconds = (each((), each(("namespace",), one), "sum") for one in increases)
    return [
        stat_panel(
            "Moves prevented",
            "VMs that a caller wanted to move within their cooldown, in the time range of the "
            "dashboard. Each counts once per cooldown, however often it was asked for. The minutes "
            "are what these moves would have taken, had each taken as long as the VM's last "
            "migration. The caller may move the VM later, or another one instead. With several "
            "replicas, the one that was asked most counts, so both numbers are lower bounds.",
            {"moves": f"round({prevented})", "minutes of migration": f"round({seconds} / 60)"},
            size=(24, 4),
            unit=units.Short,
            none="0",
        ),
        time_panel(
            "Share of blocked evictions",
            "The share of the verdicts that block the eviction, by checkpoint ('all' is the "
            "webhook, or a request without a checkpoint). A VM counts again each time a caller "
            "asks about it.",
            {"{{checkpoint}}": f"{denied} / ({answered} > 0)"},
            size=(12, 8),
            unit=units.PercentUnit,
            axis="share of the verdicts",
            most=1,
        ),
        time_panel(
            "Blocked evictions by reason",
            "Blocked evictions per minute. A VM counts again each time a caller asks about it, "
            "so this is a number of requests and not of VMs.",
            {"{{reason}}": f"60 * {each(('reason',), rates, 'sum')}"},
            size=(12, 8),
            unit=PER_MINUTE,
            axis="evictions per minute",
            stacked=True,
        ),
        heatmap_panel(
            "Cooldowns that blocked an eviction",
            "Evictions that a cooldown blocked, by the length of the cooldown. With the default "
            "policy, each further migration usually moves the cooldown of a VM up by one row. If "
            "the colour moves up, the same VMs are moved again and again.",
            each(("le",), increase(f"{COOLDOWNS}_bucket"), "sum"),
            size=(12, 8),
            unit=units.Seconds,
        ),
        time_panel(
            "Requests for verdicts",
            "Requests per second for verdicts and for the list of blocked VMs. Without requests, "
            "only the admission webhook can block evictions.",
            {"{{endpoint}}": requests},
            size=(12, 8),
            unit=units.RequestsPerSecond,
            axis="requests per second",
        ),
    ]


def _load() -> Section:
    """For each node its load, and the moves of its VMs."""
    idle = rate_other("node_cpu_seconds_total", 'mode="idle"')
    waiting = (
        each(("instance",), rate_other(f"node_pressure_{resource}_waiting_seconds_total"))
        for resource in ("cpu", "memory")
    )
    for_cpu, for_memory = (of_node(rate) for rate in waiting)
    migrating = select_by("node", VMIS, 'verdict="migration_in_progress"')
    blocked = select_by("node", BLOCKS, range_function=f"rate({{}}[{RATE}])")
    return [
        time_panel(
            "Load of $node",
            "CPU use, and the share of time in which tasks wait for CPU or memory (PSI). This "
            "panel needs the metrics of node_exporter, whose label nodename must be the name of "
            "the Kubernetes node.",
            {
                "waiting for CPU": for_cpu,
                "waiting for memory": for_memory,
                "CPU use": of_node(f"(1 - {each(('instance',), idle, 'avg')})"),
            },
            size=(12, 8),
            unit=units.PercentUnit,
            each_node=True,
        ),
        time_panel(
            "Moves of the VMs of $node",
            "VMs of the node that are migrating, and blocked evictions per minute. If the load is "
            "high and evictions are blocked, the descheduler cannot relieve the node.",
            {
                "migrating": each(("node",), migrating),
                "blocked per minute": f"60 * {each(('node',), rename(blocked, 'node'), 'sum')}",
            },
            size=(12, 8),
            unit=units.Short,
            axis="VMs, evictions",
            each_node=True,
        ),
    ]
