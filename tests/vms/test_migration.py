"""A real VM is evicted, migrated and cools down; the exporter is upgraded meanwhile."""

from collections.abc import Callable
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from exporter.kube.objects.instants import parse_instant
from tests.e2e.asking import Caller
from tests.e2e.cluster import Cluster, Object
from tests.e2e.images import EARLIER, EARLIER_COMMIT, EXPORTER, check_out
from tests.e2e.terminal import Terminal
from tests.generate.manifests import REGISTRY
from tests.vms.answers import ask_vmi
from tests.vms.conftest import COOLDOWN, read_log
from tests.vms.kubevirt import SLOW, SPACE, Machine


def samples(caller: Caller, name: str) -> list[tuple[str, dict[str, str], float]]:
    """The samples of /metrics about one VM."""
    families = text_string_to_metric_families(caller.read("/metrics", 9811))
    return [
        (sample.name.removeprefix("kubevirt_vmi_"), sample.labels, sample.value)
        for family in families
        for sample in family.samples
        if sample.labels.get("name") == name
    ]


def seconds_of(state: Object) -> float:
    """The duration of a migration that has ended."""
    began, ended = (parse_instant(state[f"{name}Timestamp"]) for name in ("start", "end"))
    assert began is not None
    assert ended is not None
    return ended - began


def test_evict_migrate_cool_down(
    cluster: Cluster,
    caller: Caller,
    machine: Callable[[str], Machine],
    prove: Callable[[str], None],
) -> None:
    """Verdict, page, metrics and log are right in each phase of a real migration."""
    db = machine("db1")
    db.start("n1", fill=8, copied=SLOW)
    db.until(lambda: caller.verdict(SPACE, "db1")["known"], "known to the exporter")
    assert caller.verdict(SPACE, "db1")["allowed"]
    assert "evacuation_state" not in {name for name, _, _ in samples(caller, "db1")}

    assert "Eviction triggered evacuation" in db.evict()
    db.until_copying()
    assert caller.verdict(SPACE, "db1")["reason"] == "migration_in_progress"
    evacuation = ask_vmi(caller, "db1")["evacuation"]
    assert (evacuation["state"], evacuation["mode"]) == ("migrating", "PreCopy")
    assert evacuation["nextStep"] == "Wait: KubeVirt is moving the VM."
    states = [labels for name, labels, _ in samples(caller, "db1") if name == "evacuation_state"]
    assert [(state["state"], state["node"]) for state in states] == [("migrating", "n1")]
    assert "migrating" in caller.read(f"/vmis/{SPACE}/db1")

    db.until_moved("n1")
    state = db.state()
    db.until(lambda: ask_vmi(caller, "db1")["evacuation"] is None, "no evacuation any more")
    verdict = caller.verdict(SPACE, "db1")
    ended = parse_instant(state["endTimestamp"])
    assert ended is not None
    cooldown = max(COOLDOWN, seconds_of(state))
    assert verdict["reason"] == "cooldown"
    assert parse_instant(verdict["notBefore"]) == ended + cooldown
    values = {name: value for name, _, value in samples(caller, "db1")}
    assert values["eviction_not_before_timestamp_seconds"] == ended + cooldown
    assert values["eviction_cooldown_seconds"] == cooldown
    assert "cooldown" in caller.read(f"/vmis/{SPACE}/db1")

    db.until(lambda: caller.verdict(SPACE, "db1")["allowed"], "allowed after its cooldown")
    uid = state["migrationUid"]
    for line in ("migration_began", "migration_ended"):
        logged = [entry for entry in read_log(cluster) if entry["event"] == line]
        assert uid in {entry["kubevirt.migration.uid"] for entry in logged}
    (row,) = caller.history(SPACE, "db1")
    assert (row["uid"], row["outcome"], row["handedOff"]) == (uid, "succeeded", True)
    prove(
        f"evict, migrate, cool down: copied in {seconds_of(state):.0f} s, verdicts right throughout"
    )


def test_an_upgrade_in_the_middle_of_a_migration(
    exporter: tuple[Terminal, Caller],
    machine: Callable[[str], Machine],
    tmp_path: Path,
    prove: Callable[[str], None],
) -> None:
    """An upgrade during a migration keeps history and verdicts."""
    check_out(EARLIER_COMMIT, tmp_path, "deploy")
    (tmp_path / "kustomization.yaml").write_text(
        "resources: [deploy/overlays/standalone]\n"
        f"images: [{{name: {REGISTRY}/exporter, newTag: earlier}}]\n"
    )
    terminal, caller = exporter
    db = machine("db2")
    cluster = db.cluster
    db.start("n1")
    db.until_ended(db.migrate())
    apply = ("apply", "--server-side", "--force-conflicts", "-k")
    cluster.kubectl(*apply, str(tmp_path))
    cluster.rolled_out()
    db.until(lambda: len(caller.history(SPACE, "db2")) == 1, "its history")

    db.label(copied=SLOW)
    node = db.node
    vmim = db.migrate()
    db.until_copying()
    assert caller.verdict(SPACE, "db2")["reason"] == "migration_in_progress"
    terminal.type_unlisted(
        "kubectl apply --server-side --force-conflicts -k deploy/overlays/admission"
    )
    cluster.rolled_out()
    images = {row["image"] for pod in cluster.pods() for row in pod["spec"]["containers"]}
    assert images == {EXPORTER.name}
    assert EXPORTER.name != EARLIER.name
    assert db.state().get("endTimestamp") is None
    assert caller.verdict(SPACE, "db2")["reason"] == "migration_in_progress"

    assert db.until_ended(vmim)["status"]["phase"] == "Succeeded"
    db.until_moved(node)
    db.until(lambda: caller.verdict(SPACE, "db2")["reason"] == "cooldown", "cooling down")
    first, second = caller.history(SPACE, "db2")
    assert (first["outcome"], second["outcome"]) == ("succeeded", "succeeded")
    base = max(COOLDOWN, seconds_of(db.state()))
    assert caller.verdict(SPACE, "db2")["effectiveCooldownSeconds"] == 2 * base
    prove("an upgrade in the middle of a migration: two of two migrations on record")
