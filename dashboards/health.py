"""Whether the exporter can be trusted, and how it is itself."""

import re
from collections.abc import Sequence
from pathlib import Path

from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Panel

from dashboards.looks import (
    BLUE,
    GREEN,
    RED,
    YELLOW,
    YES_IS_BAD,
    YES_IS_GOOD,
    Column,
    ask_bars,
    ask_over_time,
    ask_stat,
    ask_table,
)
from dashboards.queries import (
    REQUESTS,
    each,
    increase,
    of_endpoints,
    rate,
    select,
    select_other,
)


Section = Sequence[Builder[Panel]]

ANSWERED_AT_ONCE = "[^_]+"
"""Every endpoint but blocked_wait."""
RULES = Path(__file__).parents[1] / "alerts" / "rules.yaml"
RUNBOOKS = re.findall(r"^ +(https://\S+)/\w+[.]md$", RULES.read_text(), re.MULTILINE)[0]
"""Where the runbooks are published, as the rules say."""
NOBODY = "no exporter"


def trust() -> Section:
    """Whether it sees everything, and which alerts there are."""
    synced = select("kubevirt_eviction_exporter_synced")
    hidden = select("kubevirt_eviction_exporter_permission_missing")
    contact = select("kubevirt_eviction_exporter_last_contact_timestamp_seconds")
    requests = each(("le", "endpoint"), of_endpoints(f"{REQUESTS}_bucket", ANSWERED_AT_ONCE), "sum")
    alerts = select_other("ALERTS", 'kubernetes_operator_component="kubevirt-eviction-exporter"')
    return [
        ask_stat(
            "Has each read everything?",
            "yes once each replica has read a whole list of every resource that it may see. Until "
            "then it answers verdicts with 503, and the panels below are incomplete.",
            {"": each((), f"{synced} unless {hidden} == 1", "min")},
            size=(4, 6),
            unit=units.Short,
            answers=YES_IS_GOOD,
            none=NOBODY,
        ),
        ask_stat(
            "Which versions, how many replicas?",
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
            "How long has each been running?",
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
            "How long is the API server silent?",
            "Time since the last event, bookmark or list of each resource, in the replica that "
            "has waited longest. A quiet API server speaks about every minute. From "
            "kube.staleAfter on answers say that they are stale; kube.deadAfter later only "
            "cooldowns still block.",
            f"time() - {each(('resource',), f'{contact} > 0', 'min')}",
            size=(5, 6),
            legend="{{resource}}",
            unit=units.Seconds,
            steps=((None, GREEN), (90, YELLOW)),
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
        ask_table(
            "Which alerts fire or are pending, and what is to be done?",
            "The alerts of this project in the chosen cluster; each leads to its runbook. Without "
            "the rules of alerts/ in this Prometheus the table is empty.",
            [Column("How many", each(("alertname", "severity", "alertstate"), alerts, "count"))],
            size=(24, 7),
            labels={"alertname": "Alert", "severity": "Severity", "alertstate": "State"},
            sort_by="How many",
            links={"Alert": ("Open the runbook", f"{RUNBOOKS}/${{__value.text}}.md")},
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
            "How much does it hold, and leave out?",
            "Objects in memory; and the VMs that have no series of their own because more than "
            "limits.vmiSeries are held or evacuated. The tables lack those, the sums do not.",
            {
                "{{resource}}": each(("resource",), select("kubevirt_eviction_exporter_objects")),
                "VMs left out": each((), select("kubevirt_eviction_exporter_vmis_left_out")),
            },
            size=(6, 7),
            unit=units.Short,
        ),
    ]


def own() -> Section:
    """Its checkpoint, its errors, and what it costs."""
    checkpoint = "kubevirt_eviction_exporter_checkpoint"
    unwritten = select(f"{checkpoint}_unwritten_timestamp_seconds")
    written = select(f"{checkpoint}_written_timestamp_seconds")
    certificate = select("kubevirt_eviction_exporter_certificate_not_after_timestamp_seconds")
    faults = increase(f"{checkpoint}_faults_total")
    return [
        ask_stat(
            "Who writes the checkpoint?",
            "yes for the replica that writes: with several, the holder of the Lease. None for long "
            "means that history is not stored.",
            {"{{instance}}": each(("instance",), select(f"{checkpoint}_writer"))},
            size=(4, 7),
            unit=units.Short,
            answers={0: ("no", BLUE), 1: ("yes", GREEN)},
            none="no checkpoint",
        ),
        ask_over_time(
            "How old is the checkpoint?",
            "waiting: the age of the oldest change that no replica has written. written: since "
            "everything was last seen written. A waiting line that keeps rising is a fault.",
            {
                "waiting": f"time() - {each((), f'{unwritten} > 0', 'min')}",
                "written": f"time() - {each((), f'{written} > 0')}",
            },
            size=(6, 7),
            unit=units.Seconds,
        ),
        ask_over_time(
            "What went wrong with the checkpoint?",
            "Faults, each of them survived. conflict is another writer's, and harmless; the log "
            "says more about the others (checkpoint_fault).",
            {"{{fault}}": each(("fault",), faults, "sum") + " > 0"},
            size=(6, 7),
            unit=units.Short,
            stacked=True,
        ),
        ask_over_time(
            "Which requests are answered by an error?",
            "Per minute, by HTTP status. 401 and 403: a caller without a token or a role. 503: it "
            "has not read the cluster yet.",
            {
                "{{status}}": "60 * "
                + each(
                    ("status",), rate("kubevirt_eviction_exporter_refused_requests_total"), "sum"
                )
            },
            size=(8, 7),
            unit=units.CountsPerMinute,
        ),
        ask_over_time(
            "How much memory does each replica take?",
            "Resident memory. It grows with the number of VMs and their migrations, not with time.",
            {"{{instance}}": each(("instance",), select("process_resident_memory_bytes"))},
            size=(8, 7),
            unit=units.BytesIEC,
        ),
        ask_over_time(
            "How much CPU does each replica take?",
            "Of one core, which is all that it can use.",
            {"{{instance}}": each(("instance",), rate("process_cpu_seconds_total"))},
            size=(8, 7),
            unit=units.PercentUnit,
        ),
        ask_bars(
            "When do its certificates end?",
            "Time left, by listener. They are read again within seconds of their renewal.",
            f"{each(('listener',), certificate, 'min')} - time()",
            size=(8, 7),
            legend="{{listener}}",
            unit=units.DurationSeconds,
            steps=((None, RED), (14 * 86_400, GREEN)),
        ),
    ]
