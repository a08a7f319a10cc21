"""Exceptions from the policy in the whole program: overrides, and an update of KubeVirt."""

import time
from pathlib import Path
from typing import Any

import yaml

from exporter.cli.commands import Exit
from tests.cluster import KUBEVIRTS, VMIS, vmi
from tests.cluster.users import open_kubeconfig
from tests.support.api_servers import SimulatedStage
from tests.support.lives import rfc3339
from tests.system.test_conclusions_live import running
from tests.unit.cli.test_commands import ask


async def test_overrides_and_an_update(simulated: SimulatedStage, tmp_path: Path) -> None:
    """Labels give VMs their own policies; a KubeVirt update blocks all evictions."""
    namespace = await simulated.make_namespace()
    admin = simulated.admin
    metadata = {"namespace": namespace, "name": "kubevirt"}
    kind = {"apiVersion": "kubevirt.io/v1", "kind": "KubeVirt"}
    await admin.create(KUBEVIRTS, {**kind, "metadata": metadata})
    now = time.time()
    times = {"startTimestamp": rfc3339(now - 3700), "endTimestamp": rfc3339(now - 3600)}
    moved = {"migrationState": {"migrationUid": "m", "completed": True, **times}}
    for name, label, status in (("slow", "gold", moved), ("fixed", "fixed", {}), ("any", "", {})):
        made = vmi(name, namespace, status=status)
        made["metadata"]["labels"] = {"tier": label}
        await admin.create(VMIS, made)
    overrides = [
        {"name": "gold", "match": {"vmiLabels": {"tier": "gold"}}, "migrationCooldown": "2h"},
        {"name": "fixed", "match": {"vmiLabels": {"tier": "fix*"}}, "block": True},
    ]
    policy = {"overrides": overrides, "guards": {"platformUpdate": True}}
    async with running(simulated, tmp_path, policy=policy) as exporter:
        slow = await exporter.until_verdict(namespace, "slow", "preEviction", "cooldown")
        assert slow["effectiveCooldownSeconds"] == 7200.0
        await exporter.until_verdict(namespace, "fixed", "preEviction", "policy")
        await exporter.until_verdict(namespace, "any", "preEviction", None)
        _, explained = await exporter.get(f"/v1/vmis/{namespace}/fixed")
        assert explained["policy"]["override"] == "fixed"
        _, blocked = await exporter.get("/v1/blocked")
        assert {one["name"]: one["reason"] for one in blocked["blocked"]} == {
            "slow": "cooldown",
            "fixed": "policy",
        }

        for outdated, reason in ((2, "platform_update"), (0, None)):
            update: dict[str, Any] = {"outdatedVirtualMachineInstanceWorkloads": outdated}
            await admin.merge_status(KUBEVIRTS, namespace, "kubevirt", update)
            await exporter.until_verdict(namespace, "any", "filter", reason)


async def test_check_names_the_entry_of_a_vm(simulated: SimulatedStage, tmp_path: Path) -> None:
    """`check` reads the VMI's labels and priority class in the cluster."""
    namespace = await simulated.make_namespace()
    made = vmi("slow", namespace, spec={"priorityClassName": "critical-1"})
    made["metadata"]["labels"] = {"tier": "gold"}
    await simulated.admin.create(VMIS, made)
    await simulated.admin.create(VMIS, vmi("any", namespace))
    match = {"vmiLabels": {"tier": "g*"}, "priorityClasses": ["critical-*"]}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.dump({"policy": {"overrides": [{"name": "gold", "match": match}]}}))
    kubeconfig = open_kubeconfig(tmp_path / "kubeconfig", simulated.url)

    async def check(name: str) -> tuple[int, str]:
        asked = ("--explain", f"{namespace}/{name}", "--kubeconfig", str(kubeconfig))
        code, out, err = await ask("check", "--config", str(config), *asked)
        return code, out + err

    code, said = await check("slow")
    assert code == Exit.OK
    assert f"{namespace}/slow: the entry gold of policy.overrides: migrationCooldown 15m" in said
    code, said = await check("any")
    assert code == Exit.OK
    assert f"{namespace}/any: no entry of policy.overrides" in said
    code, said = await check("gone")
    assert code == Exit.NO_SUCH_VMI
    assert "there is no such VMI" in said
    simulated.server.answer(VMIS.plural, 403)
    code, said = await check("slow")
    assert code == Exit.CANNOT_ASK
    assert "its labels or priority class decide, and it cannot be read: " in said
