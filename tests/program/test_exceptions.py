"""`check` names the entry of `policy.overrides` that applies to a VM of a cluster."""

from pathlib import Path

import yaml

from exporter.errors import Exit
from tests.cluster import VMIS, vmi
from tests.cluster.users import open_kubeconfig
from tests.support.api_servers import SimulatedStage
from tests.support.commands import run_command


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
        code, out, err = await run_command("check", "--config", str(config), *asked)
        return code, out + err

    code, output = await check("slow")
    assert code == Exit.OK
    assert f"{namespace}/slow: the entry gold of policy.overrides: migrationCooldown 15m" in output
    code, output = await check("any")
    assert code == Exit.OK
    assert f"{namespace}/any: no entry of policy.overrides" in output
    code, output = await check("gone")
    assert code == Exit.NO_SUCH_VMI
    assert "there is no such VMI" in output
    simulated.server.answer(VMIS.plural, 403)
    code, output = await check("slow")
    assert code == Exit.CANNOT_ASK
    assert "decide which entry applies, but the VMI cannot be read: " in output
