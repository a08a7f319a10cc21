"""The tables of SECURITY.md agree with the manifests, and the tests of its claims exist."""

import re
from pathlib import Path

import pytest

from exporter.settings import read_settings
from tests.generate.manifests import (
    ADDITIONS,
    ENCRYPTED,
    NAME,
    OVERLAYS,
    ROOT,
    TLS_SECRET,
    config_of,
    containers,
    only,
    pod_templates,
    render,
)
from tests.support.documents import CLAIMS, SECURITY, table


SPOKEN = {
    ("kubevirt-eviction-exporter-lease", "leases", 1): "the lease by name",
    ("kubevirt-eviction-exporter-requests-lease", "leases", 1): "the lease by name",
    ("kubevirt-eviction-exporter-descheduler", "leases", 0): "leases of its namespace",
    ("kubevirt-eviction-exporter-descheduler", "leases", 1): "the lease of the leader",
    ("kubevirt-eviction-exporter-prometheus", "pods", 0): "pods of its namespace",
}
"""The table's words for rules that hold for a namespace or for names."""


def full_name(cell: str) -> str:
    """A role's full name."""
    return cell.strip("`").replace("…", NAME)


def rules() -> set[tuple[str, str, str]]:
    """Role, verbs and objects of each rule, in the table's format."""
    rules = set()
    for folder in (*OVERLAYS, *ADDITIONS):
        for role in render(folder):
            for rule in role.get("rules", []):
                name = role["metadata"]["name"]
                named = rule.get("resources", rule.get("nonResourceURLs"))
                key = (name, named[0], len(rule.get("resourceNames", [])))
                objects = SPOKEN.get(key, ", ".join(named))
                rules.add((name, ", ".join(rule["verbs"]), objects))
    return rules


def test_the_rules_are_those_of_the_manifests() -> None:
    """Each rule of each role has its row, and each row its rule."""
    rows = {
        (full_name(row[0]), row[1], row[2]) for row in table(SECURITY, "What the accounts may do")
    }

    assert rows == rules()
    assert len(rows) == len(table(SECURITY, "What the accounts may do"))


def test_the_listeners_are_those_of_the_manifests() -> None:
    """The table has every address on which an installation listens, and whether it has TLS."""
    listening = set()
    for folder in OVERLAYS:
        settings = read_settings(config_of(render(folder)))
        listening.add((Path(folder).name, f"local, {settings.listen.local}", False))
        for address in settings.listen.query:
            place = str(address) if address.path else str(address.port)
            where = "loopback" if address.is_local and not address.path else place
            secure = settings.tls_query.cert_file and not address.is_local
            listening.add((Path(folder).name, f"query, {where}", bool(secure)))
        for address in settings.listen.metrics:
            secure = settings.tls_metrics.cert_file is not None
            listening.add((Path(folder).name, f"metrics, {address.port}", secure))
        for address in settings.listen.admission:
            listening.add((Path(folder).name, f"admission, {address.port}", True))
    rows = set()
    for installations, listener, _, tls, *_ in table(SECURITY, "What each listener exposes"):
        if "descheduler" in listener:
            continue
        names = [Path(overlay).name for overlay in OVERLAYS]
        named = names if installations == "all" else re.findall("`(.*?)`", installations)
        rows |= {(name, listener.replace("`", ""), tls != "no") for name in named}

    assert rows == listening


def test_the_pods_are_as_told() -> None:
    """What the standard `restricted` does not demand: file system, token and network."""
    for folder in OVERLAYS:
        (template,) = pod_templates(render(folder))
        for container in containers(template).values():
            assert container["securityContext"]["readOnlyRootFilesystem"]
        account = only(render(folder), "ServiceAccount")
        assert account["automountServiceAccountToken"] is False
        policy = only(render(folder), "NetworkPolicy")["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]


def test_the_certificate_is_the_only_secret_mounted() -> None:
    """No other Secret and no path of the node is mounted."""
    for folder in OVERLAYS:
        (template,) = pod_templates(render(folder))
        volumes = template["spec"]["volumes"]
        kinds = [next(kind for kind in volume if kind != "name") for volume in volumes]
        secrets = [volume["secret"]["secretName"] for volume in volumes if "secret" in volume]
        assert secrets == ([TLS_SECRET] if folder in ENCRYPTED else [])
        assert set(kinds) <= {"configMap", "secret", "emptyDir"}
        assert not re.search("secretKeyRef|secretRef", str(template))


@pytest.mark.parametrize(
    "row", table(CLAIMS, "Tests of these claims"), ids=lambda row: row[1].rpartition("::")[2]
)
def test_each_claim_has_its_test(row: list[str]) -> None:
    """Each test that tests/integration/deploy/claims.md names exists."""
    file, _, name = row[1].strip("`").partition("::")

    assert re.search(rf"^(?:async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)
