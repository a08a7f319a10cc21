"""What `explain` says about objects that KubeVirt's controllers and the kubelet wrote."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from exporter.cli.explain import show_vmi
from exporter.cli.layout import Screen
from exporter.kube.objects.instants import parse_instant
from tests.support.field import serve
from tests.unit.engine.evacuations.test_recorded import FOLDER, RESOURCES


WORDS: dict[str, tuple[float, tuple[str, ...], tuple[str, ...]]] = {
    "1.9.0/target_gated": (
        2000,
        ("Raise the ApplicationAwareResourceQuota", "ApplicationAwareQuotaGate"),
        ("no node can take", "Make room"),
    ),
    "1.9.0/further/ended_not_finished.hotplug": (
        2000,
        ("HotVCPUChange: CPUs are being plugged", "Restart the VM"),
        ("Abort", "Wait"),
    ),
    "1.9.0/further/ended_not_finished.deleted": (
        2000,
        ("HotVCPUChange: CPUs are being plugged", "Restart the VM"),
        ("Abort", "Wait"),
    ),
    "1.9.0/further/target_not_ready.volume": (
        2000,
        (
            "PodReadyToStartContainers: its network or a volume is not ready",
            "the kubelet's events are on the pod",
            "describe pods",
        ),
        ("Read the events of the VM", "PodInitializing"),
    ),
    "1.9.0-nodes/further/migration_stalled.source": (
        2000,
        ("Check virt-handler on the VM's own node n2", "spec.nodeName=n2"),
        ("fence", "launcher's log"),
    ),
    "1.9.0-nodes/further/migration_stalled.target": (
        2000,
        ("Check the target's virt-handler, on n2", "spec.nodeName=n2"),
        ("fence", "launcher's log"),
    ),
}
"""By recording: how many seconds later `explain` is asked, and what it says, and does not say."""


def read_objects(recorded: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a recording, each with the plural of its resource."""
    moved = [recorded["vmi"], *recorded["vmims"], *recorded["pods"]]
    for value in [recorded["kubevirt_cr"], *recorded.get("nodes", ()), *moved]:
        yield RESOURCES[value["kind"]].value, value


@pytest.mark.parametrize("name", WORDS)
def test_the_words_fit_what_was_recorded(name: str) -> None:
    """`explain` names the cause and the step of what really happened."""
    recorded = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    after, texts, unsaid = WORDS[name]
    now = (parse_instant(recorded["now"]) or 0.0) + after
    metadata = recorded["vmi"]["metadata"]
    service = serve(read_objects(recorded), now)
    vmi = service.describe_vmi(metadata["namespace"], metadata["name"], now)
    assert vmi is not None
    text = show_vmi(vmi, Screen())
    for part in texts:
        assert part in text
    for part in unsaid:
        assert part not in text
