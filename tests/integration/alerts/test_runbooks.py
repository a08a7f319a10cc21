"""Each alert has one runbook, which agrees with the rule and whose commands run."""

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from exporter.engine.evacuations.obstacles import Obstacle
from exporter.engine.facts.model import DRAIN_TAINT
from exporter.engine.facts.states import State
from exporter.errors import Exit
from exporter.metrics.exposition import FAMILIES
from exporter.runbooks import read_runbook
from exporter.server.api.openapi import ROUTES
from exporter.settings import Settings
from exporter.words.advice import ACTIONS, BOTH_LIMITS, name_step
from tests.cluster import PODS, VMIMS, VMIS, find_binary, launcher_pod, vmi, vmim
from tests.cluster.rig import Rig
from tests.cluster.users import open_kubeconfig
from tests.generate.reference import BLIND_SPOT, fill_losses
from tests.generate.rules import (
    all_alerts,
    all_rules,
    fenced,
    list_causes,
    load_groups,
    load_runbooks,
)
from tests.support.api_servers import RealStage
from tests.support.documents import REFERENCE, bare, read, table
from tests.support.foreign_metrics import FOREIGN
from tests.support.kubectl_plugin import write_plugin
from tests.support.program import Program, program
from tests.support.serving import serving


ALERTS = all_alerts(load_groups())
TEXTS = load_runbooks()
DEPLOYMENT = "deployment/kubevirt-eviction-exporter"
SELECTOR = "app.kubernetes.io/name=kubevirt-eviction-exporter"
KNOWN = {
    *(family.name for family in FAMILIES),
    *(f"{family.name}_count" for family in FAMILIES if family.type == "histogram"),
    *FOREIGN,
    *(rule["record"] for rule in all_rules(load_groups()) if "record" in rule),
}
METRIC = re.compile(r"\b(?:\w+:)?(?:kubevirt_|descheduler_kubevirt_)\w+(?::\w+)?")


REAL_ONLY = "# on a real cluster only"


def commands(text: str) -> list[str]:
    """The commands of a runbook, in order; a block can be pasted, so it has no prompt."""
    lines = [line for block in fenced(text, "bash") for line in block.splitlines()]
    assert not any(line.startswith("$") for line in lines)
    return [line for line in lines if not line.startswith("#")]


def demo_commands(text: str) -> list[str]:
    """The commands of a runbook that the demo supports: those that are not below `REAL_ONLY`."""
    blocks = (block.partition(f"{REAL_ONLY}\n")[0] for block in fenced(text, "bash"))
    return [line for block in blocks for line in block.splitlines()]


def needs_add_on(command: str) -> bool:
    """Whether a command needs what no cluster of the tests has: a VirtualMachine, or an operator
    that gates pods.
    """
    return command.startswith("virtctl ") or bool(
        re.search("applicationawareresourcequotas|kueue", command)
    )


def section(text: str, heading: str) -> str:
    """A section as one line."""
    inside = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert inside is not None
    return " ".join(inside[1].split())


DEMO_COMMANDS = list(dict.fromkeys(line for text in TEXTS.values() for line in demo_commands(text)))
CANCEL = next(line for line in commands(TEXTS["KubeVirtEvacuationStuck"]) if "cancel" in line)
EVERY_COMMAND = list(dict.fromkeys(line for text in TEXTS.values() for line in commands(text)))


@pytest.mark.parametrize("name", TEXTS)
def test_runbook_explains_its_alert(name: str) -> None:
    """The section Meaning has the first metric of the rule and each `cause`."""
    rule = ALERTS[name]
    meaning = section(TEXTS[name], "Meaning")
    compared = re.search(r"(?:\w+:)?((?:kubevirt|descheduler_kubevirt)_\w+)", rule["expr"])
    assert compared is not None
    recorded = {"_cooldown_ratio": "", "_reviews_missing": "_admission_reviews_total"}
    metric = compared[1]
    for word, raw in recorded.items():
        metric = metric.replace(word, raw)
    assert f"`{metric}" in meaning
    for cause in list_causes(rule):
        assert f"`{cause}`" in meaning, cause


@pytest.mark.parametrize("name", TEXTS)
def test_runbook_names_only_what_there_is(name: str) -> None:
    """The metrics, settings and runbooks that a runbook names exist."""
    text = TEXTS[name]
    for metric in METRIC.findall(text):
        assert metric in KNOWN, metric
    settings = {bare(row[0]) for row in table(REFERENCE, "Settings")}
    for setting in re.findall(r"`((?:stuck|kube|limits|policy)\.\w+)`", text):
        assert setting in settings, setting
    for label, target in re.findall(r"\[(KubeVirt\w+)\]\(([^)]+)\)", text):
        assert target == f"{label}.md"
        assert label in ALERTS


@pytest.mark.parametrize("obstacle", ACTIONS)
def test_the_step_has_the_action_that_names_it(obstacle: State | Obstacle) -> None:
    """The step has the sentence and the command that `explain` prints, or a link to the command."""
    action = ACTIONS[obstacle]
    step = read_runbook(name_step(obstacle))
    values = {key: f'"${key.upper()}"' for key in ("namespace", "name", "attempt", "node", "pod")}
    command = action.command.format(
        **values,
        kubevirt='"$KUBEVIRT_NAMESPACE"',
        vmim='"$ATTEMPT"',
        uid='"$ATTEMPT_UID"',
        taint=DRAIN_TAINT,
        on_source=' --field-selector spec.nodeName="$NODE"',
        on_target=' --field-selector spec.nodeName="$TARGET"',
        cancel=CANCEL,
    )

    sentence = action.sentence.format(
        launcher="the one on $NODE",
        missing="$RESOURCE",
        node="$NODE",
        vm_node="$NODE",
        pod="$POD",
        copied="memory",
        gate="$GATE",
        handlers="$NODES",
        refusals="$REASONS",
        taint=DRAIN_TAINT,
        target="the target's node",
        withdrawn="$REQUESTERS",
        limit="KubeVirt's limits are reached",
        setting=BOTH_LIMITS,
    )
    assert sentence in " ".join(step.split())
    assert command in commands(step) or (command == CANCEL and "(#cancel-an-evacuation)" in step)
    assert step in TEXTS[action.runbook].partition("## Mitigation\n")[2]


def test_permission_runbook_explains_every_resource() -> None:
    """The table has what is lost without each resource: `make reference` would change nothing."""
    assert read(BLIND_SPOT) == fill_losses(read(BLIND_SPOT))


def test_every_query_is_promql() -> None:
    """Each query of each runbook parses in promtool."""
    queries = [query for text in TEXTS.values() for query in fenced(text, "promql")]
    assert queries
    for query in queries:
        subprocess.run(
            [find_binary("promtool"), "--experimental", "promql", "format", query],
            check=True,
            capture_output=True,
        )


def test_every_path_is_one_of_the_api() -> None:
    """The paths and ports in the commands are those of the exporter."""
    routes = [
        re.compile(re.sub(r"\{\w+\}", r"\\$[A-Z]+", route.path) + r"(\?.*)?$") for route in ROUTES
    ]
    paths = re.findall(r'"\$KUBEVIRT_EVICTION_EXPORTER_URL(/[^"]*)"', "\n".join(EVERY_COMMAND))
    assert paths
    for path in paths:
        assert any(route.match(path) for route in routes), path
    listen = Settings().listen
    ports = {str(address.port) for address in (*listen.query, *listen.metrics)}
    forwarded, asked = set(), set()
    for command in EVERY_COMMAND:
        if "port-forward" in command:
            words = shlex.split(command.removesuffix(" &"))
            assert words[-2] == DEPLOYMENT
            here, _, there = words[-1].partition(":")
            assert there in ports
            assert here not in ports, "a demo would answer in its place"
            forwarded.add(here)
        elif " KUBEVIRT_EVICTION_EXPORTER_URL=" in command:
            asked.add(command.rpartition(":")[2])
    assert asked == forwarded


def test_what_must_not_be_cancelled_is_said_before_how_to_cancel() -> None:
    """The warnings about post-copy and virtctl come before the command that cancels."""
    before, cancel, _ = TEXTS["KubeVirtEvacuationStuck"].partition("evacuate/cancel")
    assert cancel
    assert "PostCopy" in before
    assert "`virtctl evacuate-cancel` is broken" in " ".join(before.split())
    for name, other in TEXTS.items():
        if name != "KubeVirtEvacuationStuck" and "ancel the evacuation" in other:
            assert "post-copy" in other, name


# The tests below run the commands.

VARIABLES = {
    "NAMESPACE": "",
    "NAME": "db1",
    "NODE": "n1",
    "ATTEMPT": "attempt",
    "ATTEMPT_UID": "123e4567-e89b-12d3-a456-426614174000",
    "KUBEVIRT_EVICTION_EXPORTER_URL": "",
    "EXPORTER_NAMESPACE": "",
    "ACCOUNT": "kubevirt-eviction-exporter",
    "KUBEVIRT_NAMESPACE": "kubevirt",
    "TARGET": "n2",
    "POD": "virt-launcher-db1-x",
}


def pod(
    name: str, namespace: str, labels: dict[str, str], container: str = "compute"
) -> dict[str, Any]:
    """A pod that is never started."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {"containers": [{"name": container, "image": "none"}]},
    }


def scene(exporter: str, kubevirt: str) -> list[dict[str, Any]]:
    """The node, the exporter's deployment and pod, and virt-controller's pod."""
    key, value = SELECTOR.split("=")
    labels = {key: value}
    template = {"metadata": {"labels": labels}, "spec": pod("", "", {})["spec"]}
    return [
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}},
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "kubevirt-eviction-exporter", "namespace": exporter},
            "spec": {"selector": {"matchLabels": labels}, "template": template},
        },
        *(
            {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": name, "namespace": exporter},
            }
            for name in ("kubevirt-eviction-exporter", "kubevirt-eviction-exporter-scraper")
        ),
        pod("exporter", exporter, labels, container="exporter"),
        pod("virt-controller", kubevirt, {"kubevirt.io": "virt-controller"}),
    ]


class Operator:
    """Runs commands in a shell with a kubeconfig."""

    def __init__(self, config: Path, *programs: Path, **variables: str) -> None:
        self.variables = {**VARIABLES, **variables}
        assert all(self.variables.values())
        kubectl = str(find_binary("kubectl").parent)
        self._environment = {
            **os.environ,
            **self.variables,
            "KUBECONFIG": str(config),
            "PATH": os.pathsep.join(
                (*map(str, programs), kubectl, str(Path(sys.executable).parent), os.environ["PATH"])
            ),
        }

    async def run(self, command: str, given: str = "") -> str:
        """Run a command; returns its output."""
        code, output, complained = await self.attempt(command, given)
        assert code == 0, f"{command}\n{output}\n{complained}"
        return output

    async def attempt(self, command: str, given: str = "") -> tuple[int | None, str, str]:
        """Run a command; returns its exit code, its output and its errors.

        With a selector, `kubectl describe` and `kubectl logs` list pods and then get each, so they
        fail if one is deleted in between. They are run again then, as a person would.
        """
        while True:
            process = await asyncio.create_subprocess_exec(
                *("bash", "-euo", "pipefail", "-c", command),
                env=self._environment,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            output, complained = await process.communicate(given.encode())
            if " -l " not in command or b"(NotFound): pods " not in complained:
                return process.returncode, output.decode(), complained.decode()


def what_there_is_to_log(command: str) -> str:
    """The command that lists the pods whose logs a `kubectl logs` command prints."""
    words = shlex.split(command)
    namespace, selector = words[words.index("-n") + 1], words[words.index("-l") + 1]
    return f'kubectl -n "{namespace}" get pods -l "{selector}" -o name'


@pytest.fixture
async def exporter(real: RealStage, tmp_path: Path) -> AsyncIterator[Program]:
    """The exporter on the real API server."""
    login = str(real.login.kubeconfig)
    async with program(tmp_path, "--kubeconfig", login) as running:
        await running.ready()
        yield running


@pytest.mark.skipif(not shutil.which("curl"), reason="the runbooks use curl")
async def test_the_commands_run_against_an_api_server(
    real: RealStage, exporter: Program, tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """Every command that needs no kubelet and no virt-api succeeds on a real API server."""
    namespace = await real.make_namespace()
    write_plugin(tmp_path)
    operator = Operator(
        real.cluster.kubeconfig(real.cluster.administrator),
        tmp_path,
        NAMESPACE=namespace,
        KUBEVIRT_EVICTION_EXPORTER_URL=exporter.query,
        EXPORTER_NAMESPACE=await real.make_namespace(),
    )
    home = operator.variables["EXPORTER_NAMESPACE"]
    await operator.run("kubectl create namespace kubevirt --dry-run=client -o yaml"
                       " | kubectl apply -f -")  # fmt: skip
    made = await real.admin.create(VMIS, vmi("db1", namespace, status={"evacuationNodeName": "n1"}))
    await real.admin.create(PODS, launcher_pod(made))
    await real.admin.create(VMIMS, vmim("attempt", namespace, of="db1", evacuates="n1"))
    for document in scene(home, "kubevirt"):
        await operator.run("kubectl apply -f -", json.dumps(document))
    await operator.run(
        'kubectl -n "$EXPORTER_NAMESPACE" patch pod exporter --subresource=status'
        """ --patch '{"status": {"phase": "Running"}}'"""
    )
    await exporter.until(f"/v1/vmis/{namespace}/db1", lambda status, _: status == 200)

    ran = set()
    for command in EVERY_COMMAND:
        if command.startswith("export "):
            words = shlex.split(command)[1:]
            assert {word.partition("=")[0] for word in words} <= set(VARIABLES)
        elif "port-forward" in command:
            await operator.run(f'kubectl -n "$EXPORTER_NAMESPACE" get {DEPLOYMENT}')
        elif command.startswith("kubectl evictions "):
            # The plugin finds the pod and calls exec; there is no kubelet that runs the command.
            _, _, refused = await operator.attempt(command)
            assert "pod exporter does not have a host assigned" in refused
            asked = command.replace("kubectl evictions", "python -m exporter", 1)
            code, output, complained = await operator.attempt(asked)
            # This cluster has one node, so no VM can leave it.
            assert code in (Exit.OK, Exit.CANNOT_BE_EMPTIED), f"{asked}\n{output}\n{complained}"
            ran.add(command)
        elif " logs " in command:
            assert await operator.run(what_there_is_to_log(command)), command
        elif "evacuate/cancel" in command or needs_add_on(command):
            continue
        elif command.startswith("kubectl taint "):
            await operator.run(command.removesuffix("-") + " --overwrite")
            await operator.run(command)
            ran.add(command)
        else:
            await operator.run(command)
            ran.add(command)
    prove(f"runbooks: {len(ran)} of {len(EVERY_COMMAND)} commands run as they are written")
    assert len(ran) > len(EVERY_COMMAND) / 2


async def test_command_that_cancels_sends_what_the_exporter_advises(
    real: RealStage, exporter: Program, tmp_path: Path
) -> None:
    """Kubectl sends the method, path and body that the API returns as `cancel`."""
    namespace = await real.make_namespace()
    await real.admin.create(VMIS, vmi("db1", namespace, status={"evacuationNodeName": "n1"}))
    answer = await exporter.until(
        "/v1/evacuations",
        lambda status, body: (
            status == 200
            and any(evacuation["namespace"] == namespace for evacuation in body["evacuations"])
        ),
    )
    advised = next(row for row in answer["evacuations"] if row["namespace"] == namespace)["cancel"]
    seen: list[tuple[str, str, Any]] = []

    async def record(request: web.Request) -> web.Response:
        seen.append((request.method, request.path, json.loads(await request.text())))
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", record)
    async with serving(app) as url:
        config = open_kubeconfig(tmp_path / "kubeconfig", url)
        operator = Operator(
            config,
            NAMESPACE=namespace,
            KUBEVIRT_EVICTION_EXPORTER_URL=exporter.query,
            EXPORTER_NAMESPACE="none",
        )
        await operator.run(CANCEL)

    assert seen == [(advised["method"], advised["path"], advised["body"])]


@pytest.mark.timeout(300)
async def test_kubevirt_obeys_the_mitigation() -> None:
    """virt-api cancels the evacuation, and KubeVirt creates no further attempt."""
    cancel, delete = (
        next(command for command in commands(TEXTS["KubeVirtEvacuationStuck"]) if wanted in command)
        for wanted in ("evacuate/cancel", "delete ")
    )
    key = "stuck/db1"
    async with Rig.opened() as rig, rig.vmi(key, "unschedulable"):
        await rig.evict(key)
        await rig.until(key, lambda scene: "Scheduling" in scene.phases)
        (attempt,) = await rig.cluster.vmims("db1", "stuck")
        control = rig.cluster.control
        operator = Operator(
            control.kubeconfig(control.administrator),
            NAMESPACE="stuck",
            NODE="node-1",
            ATTEMPT=attempt["metadata"]["name"],
            KUBEVIRT_EVICTION_EXPORTER_URL="none",
            EXPORTER_NAMESPACE="none",
        )
        await operator.run(cancel)
        await rig.until(key, lambda scene: not scene.marked)
        await operator.run(delete)
        ended = await rig.until(key, lambda scene: not scene.vmims)

        assert not ended.marked
