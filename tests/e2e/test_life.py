"""Two replicas live through upgrades, a certificate renewal and the OOM killer."""

import http.client
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster import vmi
from tests.e2e.asking import Caller, Load, let_in
from tests.e2e.cluster import Cluster, Object, wait_for
from tests.e2e.documents import CERTIFICATE, SECTIONS, commands
from tests.e2e.images import EARLIER, EARLIER_COMMIT, EXPORTER, ROOT, check_out
from tests.e2e.terminal import Terminal
from tests.generate.manifests import NAMESPACE, REGISTRY
from tests.support.builders import rfc3339


@pytest.fixture(scope="module")
def installation(cluster: Cluster, scratch: Path) -> Iterator[tuple[Terminal, Caller]]:
    """Two replicas, and a caller with permission."""
    with let_in(cluster, scratch) as installation:
        yield installation


@pytest.fixture(scope="module")
def terminal(installation: tuple[Terminal, Caller]) -> Terminal:
    """The shell of the user who has installed the replicas."""
    return installation[0]


@pytest.fixture(scope="module")
def caller(cluster: Cluster, installation: tuple[Terminal, Caller]) -> Caller:
    """A caller through the Service; shop/db2 was migrated once."""
    caller = installation[1]
    migrate(cluster, "m1")
    wait_for(lambda: caller.verdict("shop", "db2")["reason"] == "cooldown", "a cooldown")
    return caller


def migrate(cluster: Cluster, uid: str) -> None:
    """Migrate shop/db2; its VMI shows only the last migration, and there are no VMIMs."""
    end = int(time.time()) - 1
    state = {"migrationUid": uid, "startTimestamp": rfc3339(end - 9), "endTimestamp": rfc3339(end)}
    cluster.apply([vmi("db2", "shop", status={"migrationState": state})])


def test_an_upgrade_and_the_way_back(
    cluster: Cluster, caller: Caller, tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """An upgrade from an earlier commit, and the way back, give no wrong answer."""
    check_out(EARLIER_COMMIT, tmp_path, "deploy")
    (tmp_path / "kustomization.yaml").write_text(
        "resources: [deploy/overlays/standalone]\n"
        f"images: [{{name: {REGISTRY}/exporter, newTag: earlier}}]\n"
    )
    revisions = []
    with Load(caller, "shop", "db2") as load:
        for folder in (tmp_path, ROOT / "deploy/overlays/standalone", tmp_path):
            cluster.kubectl("apply", "--server-side", "--force-conflicts", "-k", str(folder))
            cluster.rolled_out()
            revisions.append({image for pod in cluster.pods() for image in images(pod)})
    cluster.kubectl(
        "apply",
        "--server-side",
        "--force-conflicts",
        "-k",
        str(ROOT / "deploy/overlays/standalone"),
    )
    cluster.rolled_out()

    earlier, ours = {EARLIER.name}, {EXPORTER.name}
    assert revisions == [earlier, ours, earlier]
    assert set(load.answers) == {"cooldown"}, load.answers
    prove(f"upgrade and back: {load.answers['cooldown']} answers, none wrong")


def images(pod: Object) -> list[str]:
    """The images of a pod."""
    return [container["image"] for container in pod["spec"]["containers"]]


def test_a_certificate_is_renewed_without_a_restart(
    cluster: Cluster, terminal: Terminal, caller: Caller, prove: Callable[[str], None]
) -> None:
    """After the documented renewal every replica serves the new certificate."""
    addresses = {pod["status"]["podIP"] for pod in cluster.pods()}
    before = {at: ssl.get_server_certificate((at, 9811)) for at in addresses}
    lines = commands(SECTIONS[CERTIFICATE])
    first = next(i for i, line in enumerate(lines) if line.startswith("openssl req -newkey"))
    started = time.monotonic()
    for line in lines[first:]:
        terminal.type(line)
    wait_for(
        lambda: all(ssl.get_server_certificate((at, 9811)) != old for at, old in before.items()),
        "the new certificate served",
    )
    prove(
        f"certificate: served by each replica {time.monotonic() - started:.0f} s after the renewal"
    )
    assert caller.verdict("shop", "db2")["reason"] == "cooldown"
    assert {pod["status"]["podIP"] for pod in cluster.pods()} == addresses
    assert all(restarts(pod) == 0 for pod in cluster.pods())


def restarts(pod: Object) -> int:
    """How often a pod's containers were restarted."""
    return sum(int(container["restartCount"]) for container in pod["status"]["containerStatuses"])


def test_a_container_killed_by_memory_comes_back_with_its_history(
    cluster: Cluster, caller: Caller
) -> None:
    """A container that the OOM killer has killed restarts with its history."""
    pod = cluster.pods()[0]
    name = pod["metadata"]["name"]
    victim = replace(caller, address=pod["status"]["podIP"])
    for number in (2, 3):
        migrate(cluster, f"m{number}")
        wait_for(lambda: len(victim.history("shop", "db2")) == number, f"{number} migrations")  # noqa: B023
    before, known_at = victim.history("shop", "db2"), status_of(victim)["asOf"]
    # Before the first write `writtenAt` is null.
    wait_for(
        lambda: (status_of(victim)["history"]["writtenAt"] or "") > known_at, "a written history"
    )
    take_memory(cluster, pod)

    def was_killed() -> bool:
        with suppress(OSError, http.client.HTTPException):
            many = [{"namespace": "shop", "name": f"vm-{number}"} for number in range(10_000)]
            victim.ask("POST", "/v1/verdicts", {"candidates": many})
        (status,) = cluster.get("-n", NAMESPACE, "pod", name)["status"]["containerStatuses"]
        last = status["lastState"].get("terminated", {})
        return bool(last.get("reason") == "OOMKilled" and status["ready"])

    wait_for(was_killed, "OOMKilled, and ready again")
    assert victim.history("shop", "db2") == before


def status_of(caller: Caller) -> Object:
    """The answer of `GET /v1/status`."""
    status, answer = caller.ask("GET", "/v1/status")
    assert status == 200
    document: Object = answer
    return document


def take_memory(cluster: Cluster, pod: Object) -> None:
    """Limit a container's memory to its present use without caches."""
    (status,) = pod["status"]["containerStatuses"]
    uid = status["containerID"].rpartition("/")[2]
    script = f"""
        cd "$(find /sys/fs/cgroup/memory -type d -name {uid})"
        echo 0 >memory.force_empty
        echo $(($(cat memory.usage_in_bytes) + 131072)) >memory.limit_in_bytes
    """
    subprocess.run(cluster.node.command("bash", "-euc", script), check=True)
