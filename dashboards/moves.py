"""What was refused to whom, and what came of the moves."""

from collections.abc import Sequence

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Panel

from dashboards.looks import (
    GREEN,
    YELLOW,
    Column,
    ask_heatmap,
    ask_over_time,
    ask_stat,
    ask_table,
)
from dashboards.queries import (
    BLOCKS,
    COOLDOWNS,
    DAY,
    POLICY,
    RANGE,
    RATE,
    REQUESTS,
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
    select_other,
)


Section = Sequence[Builder[Panel]]

PER_HOUR = "suffix:/h"
NOBODY = "no exporter"


def churn() -> Section:
    """Whether the same VMs are moved again and again."""
    migrations = "kubevirt_eviction_exporter_migrations_total"
    cap = select(POLICY, 'setting="max_migration_cooldown"')
    floor = select(POLICY, 'setting="migration_cooldown"')
    in_window = each_vm("kubevirt_vmi_migrations_in_window")
    cooling = each_vm("kubevirt_vmi_eviction_cooldown_seconds")
    at_the_cap = (
        f"{cooling} == on (cluster) group_left () ({each((), cap)} > {each((), floor)})"
        f" and on (cluster, namespace, name) {in_window} > 1"
    )
    buckets = each(("le",), rate(f"{COOLDOWNS}_bucket"), "sum")
    return [
        ask_over_time(
            "How many migrations end, how, and what were they for?",
            "Ended migrations per hour by what triggered them and by their outcome. Many by the "
            "descheduler on few VMs are churn.",
            {
                "{{trigger}}: {{outcome}}": (
                    f"3600 * {each(('trigger', 'outcome'), rate(migrations))} > 0"
                )
            },
            size=(8, 8),
            unit=PER_HOUR,
            stacked=True,
        ),
        ask_over_time(
            "On which step of the backoff are the VMs?",
            "Held or evacuated VMs by how many of their migrations ended inside the window. Each "
            "one doubles the cooldown, up to the cap. A healthy cluster stays at the first steps.",
            {
                "{{migrations}} migrations": (
                    f'count_values by (cluster) ("migrations", {in_window})'
                )
            },
            size=(8, 8),
            unit=units.Short,
            stacked=True,
        ),
        ask_stat(
            "How many are at the cap?",
            "VMs that were migrated so often that they are held for maxMigrationCooldown: the "
            "backoff can do no more for them. The alert KubeVirtVMChurning names them.",
            {"": each((), at_the_cap, "count")},
            size=(4, 8),
            unit=units.Short,
            steps=((None, GREEN), (1, YELLOW)),
            none="0",
        ),
        ask_stat(
            "Which policy is in force?",
            "The settings of the replicas; 0 means off. A window not longer than six times the "
            "cap forgets migrations before the cap can hold.",
            {"{{setting}}": each(("setting",), select(POLICY))},
            size=(4, 8),
            unit=units.DurationSeconds,
            none=NOBODY,
        ),
        ask_heatmap(
            "How long were the cooldowns that refused an eviction?",
            "Refusals by the effective cooldown of the VM asked about, one row per step of the "
            "backoff. Colour moving upwards is a cluster that keeps moving the same VMs.",
            each(("le",), increase(f"{COOLDOWNS}_bucket"), "sum"),
            size=(8, 8),
            unit=units.Seconds,
        ),
        ask_over_time(
            "How long is a cooldown that refuses one?",
            "Quantiles of the effective cooldown over refusals. A value inside a bucket is "
            "interpolated; cooldowns above the last bucket show as its bound.",
            {
                "median": f"histogram_quantile(0.5, {buckets})",
                "90 %": f"histogram_quantile(0.9, {buckets})",
                "99 %": f"histogram_quantile(0.99, {buckets})",
            },
            size=(8, 8),
            unit=units.Seconds,
        ),
        ask_over_time(
            "What share of the VMs in cooldown is at the cap?",
            "VMs that are held for maxMigrationCooldown after several migrations, of all that cool "
            "down. A high share means that the same VMs are moved again and again.",
            {"at the cap": f"{each((), at_the_cap, 'count')} / {each((), cooling, 'count')}"},
            size=(8, 8),
            unit=units.PercentUnit,
            most=1,
        ),
    ]


def refused() -> Section:
    """What callers asked, and how that ended."""
    rates = select_by("namespace", BLOCKS, range_function=f"rate({{}}[{RATE}])")
    totals = select_by("namespace", BLOCKS, range_function=f"increase({{}}[{RANGE}])")
    asked = each(("endpoint",), of_endpoints(f"{REQUESTS}_count", "verdicts|blocked.*"), "sum")
    snapshot = select_other("descheduler_kubevirt_snapshot_timestamp_seconds")
    return [
        ask_over_time(
            "Does anybody ask?",
            "Requests per second for verdicts and for the set of blocked VMs. Refusals are counted "
            "only in answers to verdicts: without a caller this section is empty by design.",
            {"{{endpoint}}": asked},
            size=(6, 9),
            unit=units.RequestsPerSecond,
        ),
        ask_over_time(
            "What was refused, and why?",
            "Blocked answers per minute. One VM counts again with each cycle that asks about it, "
            "so this measures the will to move and not a number of VMs.",
            {"{{reason}}": f"60 * {each(('reason',), rates, 'sum')}"},
            size=(6, 9),
            unit=units.CountsPerMinute,
            stacked=True,
        ),
        ask_table(
            "On which nodes was it refused, and why?",
            "Blocked answers over the time range. A node with many is one that the descheduler "
            "wants to relieve and cannot; compare with what may leave it, below.",
            [
                Column(
                    "Refusals",
                    f"{each(('node', 'reason'), rename(totals, 'node'), 'sum')} > 0",
                )
            ],
            size=(6, 9),
            labels={"node": "Node", "reason": "Reason"},
            sort_by="Refusals",
        ),
        ask_over_time(
            "Does it ask about VMs that are not there?",
            "Candidates per minute that are no VM of this cluster. unknown: no such name, or not "
            "seen yet. uid: the caller sends another UID than the VMI's, most often the pod's.",
            {
                "{{reason}}": "60 * "
                + each(
                    ("reason",),
                    rate("kubevirt_eviction_exporter_unknown_candidates_total"),
                    "sum",
                )
            },
            size=(6, 9),
            unit=units.CountsPerMinute,
        ),
        ask_over_time(
            "How do the plugin's questions end?",
            "Questions of the descheduler's plugin per minute, by outcome. unavailable, stale, "
            "unknown and unnamed are no verdicts: the alert KubeVirtDeschedulerWithoutVerdict.",
            {
                "{{outcome}}": "60 * "
                + each(("outcome",), rate_other("descheduler_kubevirt_verdicts_total"), "sum")
            },
            size=(6, 8),
            unit=units.CountsPerMinute,
        ),
        ask_over_time(
            "How old is the plugin's list?",
            "Time since the exporter last told the plugin which VMs are blocked. It asks about "
            "every minute.",
            {"age": f"time() - {each((), f'{snapshot} > 0', 'min')}"},
            size=(6, 8),
            unit=units.Seconds,
        ),
        ask_over_time(
            "What does the webhook answer?",
            "Evictions per minute that the admission webhook was asked about, by outcome.",
            {
                "{{outcome}}": "60 * "
                + each(
                    ("outcome",),
                    rate("kubevirt_eviction_exporter_admission_reviews_total"),
                    "sum",
                )
            },
            size=(6, 8),
            unit=units.CountsPerMinute,
        ),
        ask_over_time(
            "Does calling the webhook fail?",
            "Calls per minute that the API server gave up, so that the eviction passed; where the "
            "API server is scraped.",
            {
                "failed": "60 * "
                + each(
                    (),
                    rate_other(
                        "apiserver_admission_webhook_fail_open_count",
                        'name="evictions.kubevirt-eviction-exporter.io"',
                    ),
                    "sum",
                )
            },
            size=(6, 8),
            unit=units.CountsPerMinute,
        ),
    ]


def load() -> Section:
    """The load of nodes beside the moves of their VMs."""
    idle = rate_other("node_cpu_seconds_total", 'mode="idle"')
    waiting = (
        each(("instance",), rate_other(f"node_pressure_{resource}_waiting_seconds_total"))
        for resource in ("cpu", "memory")
    )
    for_cpu, for_memory = (of_node(one) for one in waiting)
    refused = select_by("node", BLOCKS, range_function=f"rate({{}}[{RATE}])")
    return [
        ask_over_time(
            "Does moving VMs off $node help?",
            "Lines, left: the share of time in which tasks wait for CPU or memory (PSI), and CPU "
            "use, of node_exporter, whose kernel's host name has to be the node's name. Bars, "
            "right: VMs that are being moved away, and refusals per minute. Without node_exporter "
            "only the bars are there.",
            {
                "waiting for CPU": for_cpu,
                "waiting for memory": for_memory,
                "CPU use": of_node(f"(1 - {each(('instance',), idle, 'avg')})"),
            },
            bars={
                "being moved": each(
                    ("node",), select_by("node", VMIS, 'verdict="migration_in_progress"')
                ),
                "refused": f"60 * {each(('node',), rename(refused, 'node'), 'sum')}",
            },
            size=(24, 9),
            unit=units.PercentUnit,
            each_node=True,
        ),
    ]


def days() -> Section:
    """Long ranges, from recording rules."""
    stuck = select_other("cluster:kubevirt_eviction_exporter_stuck_evacuations:max")
    migrations = per_day("cluster:kubevirt_eviction_exporter_migrations:rate5m")
    blocks = per_day("cluster:descheduler_kubevirt_eviction_blocks:rate5m")
    return [
        ask_over_time(
            "How many migrations end per day?",
            "Within the day before each point, by outcome; from the recording rules of alerts/, so "
            "that a range of months is quick.",
            {"{{outcome}}": each(("outcome",), migrations, "sum")},
            size=(8, 8),
            unit=units.Short,
        ),
        ask_over_time(
            "How many evictions are refused per day?",
            "Within the day before each point, by reason; from the recording rules of alerts/.",
            {"{{reason}}": each(("reason",), blocks, "sum")},
            size=(8, 8),
            unit=units.Short,
        ),
        ask_over_time(
            "How many evacuations are stuck at a time?",
            "The most and the mean within the day before each point; from the recording rules of "
            "alerts/.",
            {
                "most": each((), f"max_over_time({stuck}{DAY})"),
                "mean": each((), f"avg_over_time({stuck}{DAY})"),
            },
            size=(8, 8),
            unit=units.Short,
        ),
    ]
