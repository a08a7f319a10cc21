"""The links, names and fields in the README are right, and so are the versions in the documents."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from exporter.demo import Demo
from exporter.server.api.openapi import write_openapi
from tests.generate.manifests import CHART
from tests.support.documents import (
    INSTALL,
    README,
    ROOT,
    VERSIONS,
    chapters,
    code_blocks,
    read,
    table,
)


DESCHEDULER = ROOT / "deploy" / "descheduler" / "go.mod"
TOOLS = ROOT / "tests" / "tools"
SHARED = TOOLS / "shared" / "go.mod"
PROMETHEUS_3_15 = TOOLS / "prometheus-3.15" / "go.mod"
ALERTMANAGER = TOOLS / "alertmanager" / "go.mod"


def test_it_leads_to_every_document() -> None:
    """The README's last chapter links to every document."""
    documents = {*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "deploy" / "README.md"}
    links = re.findall(r"\]\(([^)#\s]+)", chapters(README)["Where to go on"])

    assert documents - {README} <= {ROOT / link for link in links}


@pytest.mark.parametrize(
    ("what", "file", "module"),
    [
        ("kube-apiserver", SHARED, "k8s.io/kubernetes"),
        ("KubeVirt", TOOLS / "kubevirt/go.mod", "kubevirt.io/kubevirt"),
        ("descheduler", DESCHEDULER, "sigs.k8s.io/descheduler"),
        ("Helm", SHARED, "helm.sh/helm/v3"),
        (
            "Prometheus operator",
            PROMETHEUS_3_15,
            "github.com/prometheus-operator/prometheus-operator",
        ),
        ("Perses", SHARED, "github.com/perses/perses"),
        ("kustomize", SHARED, "sigs.k8s.io/kustomize/kustomize/v5"),
        ("Prometheus", SHARED, "github.com/prometheus/prometheus"),
        ("Alertmanager", ALERTMANAGER, "github.com/prometheus/alertmanager"),
    ],
)
def test_the_versions_are_those_that_the_tests_build(what: str, file: Path, module: str) -> None:
    """The row of each real server has the version that the tests pin."""
    pinned = re.search(rf"\s{re.escape(module)} v(\S+)", file.read_text(encoding="utf-8"))
    assert pinned is not None
    # The Go module of Prometheus 3.16.0 is v0.316.0.
    version = re.sub(r"^0\.(\d)(\d\d)\.", r"\1.\2.", pinned[1])
    rows = [
        row for row in table(VERSIONS, "Tested with") if row[0].split(",")[0].split("'")[0] == what
    ]

    assert [row[1].split(",")[0] for row in rows] == [version]


def test_the_oldest_kubernetes_is_that_of_the_chart() -> None:
    """docs/versions.md, docs/install.md and the chart name the same oldest Kubernetes."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    oldest = chart["kubeVersion"].removeprefix(">=").removesuffix(".0-0")
    (row,) = [row for row in table(VERSIONS, "Tested with") if row[0] == "kube-apiserver"]

    assert row[2] == f"{oldest} and newer"
    assert f"needs Kubernetes {oldest} or newer" in read(INSTALL)


def test_the_demo_has_the_vm_that_it_asks_about() -> None:
    """The commands in the chapter about the demo name a VM of the demo."""
    namespace, name = Demo(lambda: datetime.now(UTC)).example
    commands = "\n".join(code_blocks(chapters(README)["Ten minutes with the demo"], "bash"))

    assert f"explain {namespace}/{name}\n" in commands
    assert f'"namespace": "{namespace}", "name": "{name}"' in commands


def test_its_answer_has_the_fields_of_the_api() -> None:
    """The verdict in the README has exactly the fields of the OpenAPI document."""
    schemas = write_openapi()["components"]["schemas"]
    (block,) = code_blocks(chapters(README)["Ten minutes with the demo"], "json")
    answer = json.loads(block)

    assert set(answer) <= set(schemas["VerdictsAnswer"]["properties"])
    assert set(answer["verdicts"][0]) == set(schemas["VerdictAnswer"]["properties"])
