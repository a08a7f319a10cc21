"""Panels about migrations, and about the requests of callers and the answers."""

from collections.abc import Sequence

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Panel

from dashboards.looks import GREEN, YELLOW, heatmap_panel, stat_panel, time_panel
from dashboards.queries import (
    BLOCKS,
    COOLDOWNS,
    POLICY,
    RATE,
    REQUESTS,
    VM,
    VMIS,
    each,
    each_vm,
    increase,
    of_endpoints,
    of_node,
    per_day,
    rate,
    rate_other,
    rename,
    select,
    select_by,
)


Section = Sequence[Builder[Panel]]

PER_HOUR = "suffix:/h"
WEBHOOK = 'name="evictions.kubevirt-eviction-exporter.io"'


def churn() -> Section:
    """Panels that show whether the same VMs are moved again and again."""
    migrations = "kubevirt_eviction_exporter_migrations_total"
    returned = "kubevirt_eviction_exporter_returned_migrations_total"
    cap = select(POLICY, 'setting="max_migration_cooldown"')
    floor = select(POLICY, 'setting="migration_cooldown"')
    cooling = each_vm("kubevirt_vmi_eviction_cooldown_seconds", by=(*VM, "policy"))
    is_above = f"{each(('policy',), cap)} > {each(('policy',), floor)}"
    at_the_cap = (
        f"{cooling} == on (cluster, policy) group_left () ({is_above})"
        f" and on (cluster, namespace, name) {each_vm('kubevirt_vmi_migrations_in_window')} > 1"
    )
    return [
        time_panel(
            "Migrations that ended",
            "Migrations per hour, by trigger, outcome and the reason of a failure. The line "
            "'came back' counts migrations back to a node that the VM had left within the "
            "history window: the move away and the move back achieved nothing.",
            {
                "{{trigger}}: {{outcome}} ({{reason}})": (
                    f"3600 * {each(('trigger', 'outcome', 'reason'), rate(migrations))} > 0"
                ),
                "came back": f"3600 * {each((), rate(returned))} > 0",
            },
            size=(10, 8),
            unit=PER_HOUR,
            stacked=True,
        ),
        stat_panel(
            "VMs at the maximum cooldown",
            "VMs that were migrated so often that their cooldown is maxMigrationCooldown.",
            {"": each((), at_the_cap, "count")},
            size=(4, 8),
            unit=units.Short,
            steps=((None, GREEN), (1, YELLOW)),
            none="0",
        ),
        heatmap_panel(
            "Cooldowns that blocked an eviction",
            "Evictions that a cooldown blocked, by the length of the cooldown. With the default "
            "policy, each further migration usually moves the cooldown of a VM up by one row. If "
            "the colour moves up, the same VMs are moved again and again.",
            each(("le",), increase(f"{COOLDOWNS}_bucket"), "sum"),
            size=(10, 8),
            unit=units.Seconds,
        ),
    ]


def callers() -> Section:
    """Panels about the requests of callers and the answers."""
    rates = select_by("namespace", BLOCKS, range_function=f"rate({{}}[{RATE}])")
    requests = each(("endpoint",), of_endpoints(f"{REQUESTS}_count", "verdicts|blocked.*"), "sum")
    reviews = rate("kubevirt_eviction_exporter_admission_reviews_total")
    failed = rate_other("apiserver_admission_webhook_fail_open_count", WEBHOOK)
    return [
        time_panel(
            "Requests for verdicts",
            "Requests per second for verdicts and for the list of blocked VMs. Without requests, "
            "only the admission webhook can block evictions.",
            {"{{endpoint}}": requests},
            size=(6, 9),
            unit=units.RequestsPerSecond,
        ),
        time_panel(
            "Blocked evictions by reason",
            "Blocked evictions per minute. A VM counts again each time a caller asks about it, "
            "so this is a number of requests and not of VMs.",
            {"{{reason}}": f"60 * {each(('reason',), rates, 'sum')}"},
            size=(6, 9),
            unit=units.CountsPerMinute,
            stacked=True,
        ),
        time_panel(
            "Outcomes of the descheduler plugin",
            "Decisions of the plugin per minute, by outcome. The outcomes unavailable, stale, "
            "unknown and unnamed are not verdicts: see the alert "
            "KubeVirtDeschedulerWithoutVerdict.",
            {
                "{{outcome}}": "60 * "
                + each(("outcome",), rate_other("descheduler_kubevirt_verdicts_total"), "sum")
            },
            size=(6, 9),
            unit=units.CountsPerMinute,
        ),
        time_panel(
            "Outcomes of the admission webhook",
            "Evictions per minute that the webhook reviewed, by outcome. The line 'call failed' "
            "counts evictions that the API server allowed because it could not call the webhook. "
            "This line needs the metrics of the API server.",
            {
                "{{outcome}}": f"60 * {each(('outcome',), reviews, 'sum')}",
                "call failed": f"60 * {each((), failed, 'sum')}",
            },
            size=(6, 9),
            unit=units.CountsPerMinute,
        ),
    ]


def load() -> Builder[Panel]:
    """One panel with the load of a node and the moves of its VMs."""
    idle = rate_other("node_cpu_seconds_total", 'mode="idle"')
    waiting = (
        each(("instance",), rate_other(f"node_pressure_{resource}_waiting_seconds_total"))
        for resource in ("cpu", "memory")
    )
    for_cpu, for_memory = (of_node(one) for one in waiting)
    blocked = select_by("node", BLOCKS, range_function=f"rate({{}}[{RATE}])")
    return time_panel(
        "Load of $node and moves of its VMs",
        "Lines (left axis): CPU use, and the share of time in which tasks wait for CPU or memory "
        "(PSI). The lines need the metrics of node_exporter, whose label nodename must be the name "
        "of the Kubernetes node. Bars (right axis): VMs that are migrating, and blocked evictions "
        "per minute.",
        {
            "waiting for CPU": for_cpu,
            "waiting for memory": for_memory,
            "CPU use": of_node(f"(1 - {each(('instance',), idle, 'avg')})"),
        },
        bars={
            "migrating": each(
                ("node",), select_by("node", VMIS, 'verdict="migration_in_progress"')
            ),
            "blocked": f"60 * {each(('node',), rename(blocked, 'node'), 'sum')}",
        },
        size=(24, 9),
        unit=units.PercentUnit,
        each_node=True,
    )


def days() -> Section:
    """Panels for time ranges of weeks and months, from recording rules."""
    migrations = per_day("cluster:kubevirt_eviction_exporter_migrations:rate5m")
    succeeded, in_time = (
        per_day(f"source:kubevirt_eviction_exporter_evacuations_{name}:rate5m")
        for name in ("succeeded", "in_time")
    )
    return [
        time_panel(
            "Migrations per day",
            "Each point shows the migrations that ended within the day before it, by outcome. With "
            "the recording rules of alerts/, a time range of months loads fast.",
            {"{{outcome}}": each(("outcome",), migrations, "sum")},
            size=(12, 8),
            unit=units.Short,
        ),
        time_panel(
            "Evacuations that took at most 30 minutes",
            "The share of the evacuations that succeeded within the day before each point, by who "
            "requested them. This panel needs the recording rules of alerts/.",
            {
                "{{source}}": f"{each(('source',), in_time, 'sum')}"
                f" / ({each(('source',), succeeded, 'sum')} > 0)"
            },
            size=(12, 8),
            unit=units.PercentUnit,
            most=1,
        ),
    ]
