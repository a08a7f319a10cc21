"""The types and labels of other programs' metrics that our rules and panels read.

The metrics of the descheduler's plugin come from its source. The others are listed here, as in
descheduler 0.36, Kubernetes 1.37, node_exporter 1.9 and Prometheus 3.
"""

import re
from typing import NamedTuple

from tests.support.documents import ROOT


class Foreign(NamedTuple):
    """One metric of another program."""

    type: str
    labels: tuple[str, ...]


_SOURCE = ROOT / "deploy/descheduler/verdicts/metrics.go"
_DESC = re.compile(r'NewDesc\(\s*"(\w+)",\s*"[^"]*",\s*(?:\[\]string\{([^}]*)\}|nil)')


def _read_plugin() -> dict[str, Foreign]:
    return {
        name: Foreign(
            "counter" if name.endswith("_total") else "gauge",
            tuple(re.findall(r'"(\w+)"', labels)),
        )
        for name, labels in _DESC.findall(_SOURCE.read_text())
    }


PLUGIN = _read_plugin()
OTHERS = {
    "up": Foreign("gauge", ()),
    "descheduler_loop_duration_seconds_count": Foreign("counter", ()),
    "descheduler_descheduler_loop_duration_seconds_count": Foreign("counter", ()),
    "descheduler_pods_evicted_total": Foreign(
        "counter", ("namespace", "node", "profile", "result", "strategy")
    ),
    "apiserver_admission_webhook_fail_open_count": Foreign("counter", ("name", "type")),
    "node_pressure_cpu_waiting_seconds_total": Foreign("counter", ()),
    "node_pressure_memory_waiting_seconds_total": Foreign("counter", ()),
    "kubevirt_vmi_migration_data_remaining_bytes": Foreign("gauge", ("namespace", "name")),
    "node_cpu_seconds_total": Foreign("counter", ("cpu", "mode")),
    "node_uname_info": Foreign("gauge", ("nodename",)),
    "ALERTS": Foreign("gauge", ("alertname", "alertstate", "severity")),
}
FOREIGN = {**PLUGIN, **OTHERS}
