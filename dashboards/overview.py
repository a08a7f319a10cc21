"""The overview of a cluster, from "can I trust it" to "which node can be relieved"."""

from collections.abc import Mapping, Sequence

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Panel

from dashboards.looks import (
    GREEN,
    RED,
    YELLOW,
    YES_IS_BAD,
    YES_IS_GOOD,
    Column,
    ask_bars,
    ask_heatmap,
    ask_over_time,
    ask_stat,
    ask_table,
)
from dashboards.queries import (
    RANGE,
    RATE,
    VM,
    each,
    each_vm,
    increase,
    rate,
    rename,
    select,
    select_by,
)


BLOCKS = "descheduler_kubevirt_eviction_blocks_total"
COOLDOWNS = "descheduler_kubevirt_effective_cooldown_seconds"
VMIS = "descheduler_kubevirt_vmis"
POLICY = "kubevirt_eviction_exporter_policy_seconds"
REQUESTS = "kubevirt_eviction_exporter_request_duration_seconds"
STUCK = "kubevirt_eviction_exporter_stuck_evacuations"

SLOTS = 5
"""maxNoOfPodsToEvictTotal in the descheduler operator's policy for KubeVirt."""
BELOW_THE_CAP = 'le=~"14400([.]0)?"'
"""The last bucket below the default cap, as Prometheus 3 and as Prometheus 2 write it."""
PER_HOUR = "suffix:/h"
NOBODY = "no exporter"

Section = Sequence[Builder[Panel]]


def ask(vm_uid: str) -> Mapping[str, Section]:
    """The sections by their title; VMs link to the dashboard `vm_uid`."""
    url = (
        f"/d/{vm_uid}?${{__url_time_range}}&${{datasource:queryparam}}&${{job:queryparam}}"
        "&var-namespace=${__data.fields.namespace}&var-name=${__data.fields.name}"
    )
    return {
        "Can I trust it?": _trust(),
        "Which VMs are stuck, and why?": _stuck(url),
        "Who is held, and for how long?": _held(url),
        "Is anything churning?": _churn(),
        "What was the descheduler refused?": _refused(),
        "Which nodes can be relieved?": _nodes(),
    }


def _trust() -> Section:
    synced = select("kubevirt_eviction_exporter_synced")
    hidden = select("kubevirt_eviction_exporter_permission_missing")
    contact = select("kubevirt_eviction_exporter_last_contact_timestamp_seconds")
    requests = each(
        ("le", "endpoint"), rate(f"{REQUESTS}_bucket", 'endpoint!="blocked_wait"'), "sum"
    )
    return [
        ask_stat(
            "Has every replica read the whole cluster?",
            "yes once each replica has read a whole list of every resource that it may see. Until "
            "then it answers verdicts with 503, and the panels below are incomplete.",
            {"": f"min({synced} unless {hidden} == 1)"},
            size=(4, 6),
            unit=units.Short,
            answers=YES_IS_GOOD,
            none=NOBODY,
        ),
        ask_stat(
            "Which versions run, in how many replicas?",
            "Replicas that Prometheus scrapes now, by version. Two versions are a rollout.",
            {
                "{{version}}": each(
                    ("version",), select("kubevirt_eviction_exporter_build_info"), "count"
                )
            },
            size=(5, 6),
            unit=units.Short,
            none=NOBODY,
        ),
        ask_stat(
            "How long has each replica been running?",
            "A short time is a restart. Without a checkpoint the history then starts from the "
            "five migrations per VM that KubeVirt keeps.",
            {
                "{{instance}}": "time() - "
                + each(("instance",), select("process_start_time_seconds"))
            },
            size=(5, 6),
            unit=units.DurationSeconds,
            none=NOBODY,
        ),
        ask_bars(
            "How long has the API server been silent?",
            "Time since the last event, bookmark or list of each resource, in the replica that "
            "has waited longest. A quiet API server speaks about every minute. From "
            "kube.staleAfter (3 min) on answers say that they are stale; kube.deadAfter (10 min) "
            "later only cooldowns still block.",
            f"time() - {each(('resource',), f'{contact} > 0', 'min')}",
            size=(5, 6),
            legend="{{resource}}",
            unit=units.Seconds,
            steps=((None, GREEN), (90, YELLOW), (180, RED)),
        ),
        ask_stat(
            "Is anything hidden from it?",
            "yes where the API server refuses a resource: the exporter runs without it and says "
            "less. Grant list and watch, or accept what its log says is lost.",
            {"{{resource}}": each(("resource",), hidden)},
            size=(5, 6),
            unit=units.Short,
            answers=YES_IS_BAD,
            none=NOBODY,
        ),
        ask_over_time(
            "Are objects refused?",
            "Objects and watch lines that could not be read. What was known of them is kept, and "
            "may be out of date; the log names each (object_refused).",
            {
                "{{resource}}": each(
                    ("resource",), increase("kubevirt_eviction_exporter_refused_objects_total")
                )
            },
            size=(6, 7),
            unit=units.Short,
        ),
        ask_over_time(
            "Why are watches opened again?",
            "Watches that ended, by why. ended is the server's own time-out and healthy; after "
            "the others there was a pause or a new list. The log says more (watch_broke).",
            {
                "{{resource}}: {{reason}}": each(
                    ("resource", "reason"),
                    increase("kubevirt_eviction_exporter_watch_restarts_total"),
                    "sum",
                )
                + " > 0"
            },
            size=(6, 7),
            unit=units.Short,
            stacked=True,
        ),
        ask_over_time(
            "How long does an answer take?",
            "The 99th percentile by endpoint. blocked_wait is left out: it holds requests open on "
            "purpose. A descheduler asks one at a time, so this adds to its cycle.",
            {"{{endpoint}}": f"histogram_quantile(0.99, {requests})"},
            size=(6, 7),
            unit=units.Seconds,
        ),
        ask_over_time(
            "How much does it hold, and what do these panels leave out?",
            "Objects in memory; and the VMs that have no series of their own because more than "
            "limits.vmiSeries are held or evacuated. The tables lack those, the sums do not.",
            {
                "{{resource}}": each(("resource",), select("kubevirt_eviction_exporter_objects")),
                "VMs left out": f"max({select('kubevirt_eviction_exporter_vmis_left_out')})",
            },
            size=(6, 7),
            unit=units.Short,
        ),
    ]


def _stuck(url: str) -> Section:
    by_descheduler = select(STUCK, 'source="descheduler"')
    return [
        ask_stat(
            "How many evacuations are stuck?",
            "Evacuations older than stuck.after (30 min) without a migration, or that failed "
            "stuck.failedAttempts (3) times.",
            {"": f"max(sum without (source, state) ({select(STUCK)}))"},
            size=(4, 8),
            unit=units.Short,
            steps=((None, GREEN), (1, RED)),
            none="0",
        ),
        ask_stat(
            "How many eviction slots do they hold?",
            "Stuck evacuations that the descheduler asked for. Each may hold one of its slots; "
            f"at maxNoOfPodsToEvictTotal ({SLOTS} unless configured) it evicts nothing more.",
            {"": f"max(sum without (state) ({by_descheduler}))"},
            size=(4, 8),
            unit=units.Short,
            steps=((None, GREEN), (1, YELLOW), (SLOTS, RED)),
            none="0",
        ),
        ask_over_time(
            "Why are they stuck?",
            "Stuck evacuations by what holds them up now. The runbook of KubeVirtEvacuationStuck "
            "says what to do about each.",
            {"{{state}}": f"max by (state) (sum without (source) ({select(STUCK)})) > 0"},
            size=(8, 8),
            unit=units.Short,
            stacked=True,
        ),
        ask_over_time(
            "Which evacuations keep failing?",
            "Failed migrations since the evacuation was requested, of the ten VMs with the most. "
            "KubeVirt retries for ever, and keeps five of them: what failed before the exporter "
            "looked is not counted.",
            {
                "{{namespace}}/{{name}}": (
                    f"topk(10, {each_vm('kubevirt_vmi_evacuation_failed_attempts')} > 0)"
                )
            },
            size=(8, 8),
            unit=units.Short,
        ),
        ask_table(
            "Which VMs are asked to leave their node, since when, and what holds them up?",
            "Every VM that is being evacuated, the oldest request first. Diverged: KubeVirt still "
            "evacuates it while the descheduler believes the eviction over. The exporter's "
            "/v1/evacuations tells the next step for each.",
            [
                Column(
                    None,
                    each_vm("kubevirt_vmi_evacuation_state", by=(*VM, "node", "state")) + " == 1",
                ),
                Column(
                    "Asked for",
                    "time() - "
                    + each_vm("kubevirt_vmi_evacuation_requested_timestamp_seconds", how="min"),
                    unit=units.DurationSeconds,
                    red_from=1800,
                ),
                Column(
                    "Failed attempts",
                    each_vm("kubevirt_vmi_evacuation_failed_attempts"),
                    red_from=3,
                ),
                Column(
                    None, each_vm("kubevirt_vmi_evacuation_info", by=(*VM, "source", "strategy"))
                ),
                Column("Stuck?", each_vm("kubevirt_vmi_evacuation_stuck"), answers=YES_IS_BAD),
                Column(
                    "Diverged?", each_vm("kubevirt_vmi_evacuation_diverged"), answers=YES_IS_BAD
                ),
            ],
            size=(24, 10),
            labels={
                "namespace": "Namespace",
                "name": "VM",
                "node": "Node",
                "state": "State",
                "source": "Asked by",
                "strategy": "Strategy",
            },
            sort_by="Asked for",
            links={"VM": url},
        ),
    ]


def _held(url: str) -> Section:
    held = each(("verdict", "node"), select_by("node", VMIS, 'verdict!="allowed"'))
    not_before = "kubevirt_vmi_eviction_not_before_timestamp_seconds"
    return [
        ask_over_time(
            "How many VMs may not be moved, and why?",
            "VMs on the chosen nodes by the verdict that a descheduler would get now; allowed is "
            "left out.",
            {"{{verdict}}": each(("verdict",), held, "sum")},
            size=(8, 10),
            unit=units.Short,
            stacked=True,
        ),
        ask_table(
            "Which VMs are held, and for how much longer?",
            "VMs in cooldown, the longest wait first. The cooldown starts at migrationCooldown "
            "(15 min) and doubles with each migration inside migrationHistoryWindow (24 h), up to "
            "maxMigrationCooldown (6 h).",
            [
                Column(
                    "Held for another",
                    each_vm(not_before, by=(*VM, "node")) + " - time() > 0",
                    unit=units.DurationSeconds,
                ),
                Column(
                    "Cooldown",
                    each_vm("kubevirt_vmi_eviction_cooldown_seconds"),
                    unit=units.DurationSeconds,
                ),
                Column("Migrations in window", each_vm("kubevirt_vmi_migrations_in_window")),
            ],
            size=(16, 10),
            labels={"namespace": "Namespace", "name": "VM", "node": "Node"},
            sort_by="Held for another",
            links={"VM": url},
        ),
    ]


def _churn() -> Section:
    migrations = "kubevirt_eviction_exporter_migrations_total"
    cap = select(POLICY, 'setting="max_migration_cooldown"')
    floor = select(POLICY, 'setting="migration_cooldown"')
    in_window = each_vm("kubevirt_vmi_migrations_in_window")
    at_the_cap = (
        f"{each_vm('kubevirt_vmi_eviction_cooldown_seconds')} == scalar(max({cap}) > max({floor}))"
        f" and on (namespace, name) {in_window} > 1"
    )
    below = f"sum({increase(f'{COOLDOWNS}_bucket', BELOW_THE_CAP)})"
    everything = f"sum({increase(f'{COOLDOWNS}_count')})"
    buckets = each(("le",), rate(f"{COOLDOWNS}_bucket"), "sum")
    return [
        ask_over_time(
            "How many migrations end, why were they made, and how do they end?",
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
            "one doubles the cooldown: 15 min after the first, 6 h from the sixth on. A healthy "
            "cluster stays at the first steps.",
            {"{{migrations}} migrations": f'count_values("migrations", {in_window})'},
            size=(8, 8),
            unit=units.Short,
            stacked=True,
        ),
        ask_stat(
            "How many VMs have reached the cap?",
            "VMs that were migrated so often that they are held for maxMigrationCooldown: the "
            "backoff can do no more for them. The alert KubeVirtVMChurning names them.",
            {"": f"count({at_the_cap})"},
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
            "How long is the typical cooldown that refuses one, and how long the longest?",
            "Quantiles of the effective cooldown over refusals. A value inside a bucket is "
            "interpolated: cooldowns are really 15 min, 30 min, 1 h, 2 h, 4 h, 6 h, or the length "
            "of the last migration.",
            {
                "median": f"histogram_quantile(0.5, {buckets})",
                "90 %": f"histogram_quantile(0.9, {buckets})",
                "99 %": f"histogram_quantile(0.99, {buckets})",
            },
            size=(8, 8),
            unit=units.Seconds,
        ),
        ask_over_time(
            "What share of the refusals is at the cap?",
            "Refusals by a cooldown of more than four hours, which under the default policy are "
            "those at the cap of six. A high share means that the descheduler wants little else "
            "than what it may not have.",
            {"at the cap": f"1 - {below} / {everything}"},
            size=(8, 8),
            unit=units.PercentUnit,
            most=1,
        ),
    ]


def _refused() -> Section:
    rates = select_by("namespace", BLOCKS, range_function=f"rate({{}}[{RATE}])")
    totals = select_by("namespace", BLOCKS, range_function=f"increase({{}}[{RANGE}])")
    asked = each(("endpoint",), rate(f"{REQUESTS}_count", 'endpoint=~"verdicts|blocked.*"'), "sum")
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
    ]


def _nodes() -> Section:
    vmis = select_by("node", VMIS)
    movable = select_by("node", VMIS, 'verdict="allowed"')
    # Divided within each replica: two maxima may be of different instants.
    share = f"({movable}) / ignoring (verdict) sum without (verdict) ({vmis})"
    return [
        ask_bars(
            "How many VMs may leave each node now?",
            "VMs that a descheduler would be allowed to evict. A node without any cannot be "
            "relieved, however loaded it is.",
            each(("node",), movable),
            size=(12, 9),
            legend="{{node}}",
            unit=units.Short,
            steps=((None, RED), (1, GREEN)),
        ),
        ask_over_time(
            "What share of each node's VMs may leave it?",
            "Near 1 is free to move. A node that stays near 0 is held by cooldowns, or by "
            "evacuations that do not end.",
            {"{{node}}": each(("node",), share)},
            size=(12, 9),
            unit=units.PercentUnit,
            most=1,
        ),
    ]
