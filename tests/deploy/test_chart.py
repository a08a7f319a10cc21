"""The Helm chart: it renders what kustomize renders, and a real API server accepts it."""

import json
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest
import yaml

from exporter.settings import read_settings
from tests.cluster import RealCluster, find_binary
from tests.deploy.schemas import find_faults
from tests.deploy.server import apply
from tests.generate.manifests import (
    CHART,
    ELSEWHERE,
    NAME,
    NAMESPACE,
    Object,
    build,
    config_of,
    only,
    overlay,
)
from tests.generate.rules import all_alerts, load_groups
from tests.support.program import ROOT


KUBERNETES = "1.37.2"
CI = {
    path.name.removesuffix("-values.yaml"): yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((CHART / "ci").glob("*-values.yaml"))
}
TOOL_LABELS = {"helm.sh/chart", "app.kubernetes.io/managed-by"}
MONITORING = {
    "podMonitor": {"enabled": True},
    "prometheusRule": {"enabled": True},
    "dashboards": {"enabled": True},
}
MODES: dict[str, tuple[Object, str, list[str]]] = {
    "metrics": ({"mode": "metrics"}, "base", ["components/cert-manager"]),
    "metrics, plain": (
        {"mode": "metrics", "tls": {"enabled": False}},
        "base",
        ["components/plain-metrics"],
    ),
    "sidecar": ({"mode": "sidecar"}, "overlays/sidecar", ["components/cert-manager"]),
    "standalone": ({"mode": "standalone"}, "overlays/standalone", ["components/cert-manager"]),
    "admission": (
        {"mode": "standalone", "admission": {"enabled": True}},
        "overlays/admission",
        ["components/cert-manager"],
    ),
}
"""The chart's values, and the folder and components with which kustomize renders the same."""


def helm(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run helm with this standard input."""
    command = [str(find_binary("helm")), *arguments]
    return subprocess.run(command, input=given, check=False, capture_output=True, text=True)


def template(values: Object, namespace: str = NAMESPACE) -> subprocess.CompletedProcess[str]:
    """`helm template` of our chart with these values."""
    options = ("--namespace", namespace, "--kube-version", KUBERNETES, "--values", "-")
    return helm("template", NAME, str(CHART), *options, given=yaml.safe_dump(values))


def charted(values: Object, namespace: str = NAMESPACE) -> tuple[Object, ...]:
    """The objects that the chart renders."""
    made = template(values, namespace)
    assert made.returncode == 0, made.stderr
    return tuple(filter(None, yaml.safe_load_all(made.stdout)))


def comparable(objects: Iterable[Object]) -> dict[str, Object]:
    """The objects by kind and name, without hashes and tool labels, and with parsed ConfigMaps."""
    text = re.sub(r"(-(?:config|descheduler))-[a-z0-9]{10}\b", r"\1", json.dumps([*objects]))
    found = {}
    for one in json.loads(text):
        labels = one["metadata"].get("labels", {})
        one["metadata"]["labels"] = {k: v for k, v in labels.items() if k not in TOOL_LABELS}
        if one["kind"] == "ConfigMap":
            one["data"] = {name: yaml.safe_load(text) for name, text in one["data"].items()}
        if one["kind"] == "PodMonitor":  # only kustomize's transformer needs the annotations
            one["metadata"].pop("annotations", None)
        found[f"{one['kind']} {one['metadata']['name']}"] = one
    return found


@pytest.mark.parametrize("namespace", [NAMESPACE, ELSEWHERE])
@pytest.mark.parametrize("mode", MODES)
def test_the_chart_renders_what_kustomize_renders(mode: str, namespace: str) -> None:
    """Chart and kustomize render equal objects; only the Namespace is missing from the chart."""
    values, folder, components = MODES[mode]
    kustomized = overlay(
        {"namespace": namespace},
        resources=[folder, "overlays/monitoring"],
        components=components,
        transformers=["namespace"],
    )
    ours = comparable(charted({**values, **MONITORING}, namespace))
    theirs = comparable(one for one in kustomized if one["kind"] != "Namespace")

    assert ours.keys() == theirs.keys()
    for name, one in ours.items():
        assert one == theirs[name], name


@pytest.mark.parametrize("namespace", [NAMESPACE, ELSEWHERE])
def test_events_add_a_setting_and_the_component(namespace: str) -> None:
    """`events.enabled` sets `events: true`, and adds what the component adds."""
    without, ours = (
        comparable(charted({"events": {"enabled": on}}, namespace)) for on in (False, True)
    )
    place = {"namespace": namespace}
    kustomized = overlay(
        place, resources=["base"], components=["components/events"], transformers=["namespace"]
    )
    theirs = comparable(kustomized)
    config = ours.pop(f"ConfigMap {NAME}-config")["data"]

    before = without.pop(f"ConfigMap {NAME}-config")["data"]["config.yaml"]
    assert config == {"config.yaml": {**before, "events": True}}
    added = {f"{kind} {NAME}-events" for kind in ("ClusterRole", "ClusterRoleBinding")}
    assert ours.keys() - without.keys() == added
    assert all(ours[name] == theirs[name] for name in added)


def test_every_object_says_that_helm_made_it() -> None:
    """Every object has the two labels that the comparison ignores."""
    for one in charted(MONITORING):
        assert one["metadata"]["labels"].keys() >= TOOL_LABELS


@pytest.mark.parametrize("values", CI.values(), ids=CI)
async def test_a_real_api_server_takes_every_object(
    cluster: RealCluster, values: Object, tmp_path: Path
) -> None:
    """`helm lint --strict`, kubeconform and a strict dry run on the API server find no fault."""
    given = yaml.safe_dump(values)
    linted = helm("lint", "--strict", str(CHART), "--values", "-", given=given)
    assert linted.returncode == 0, linted.stdout
    objects = charted(values)

    openapi = await cluster.admin.request("GET", "/openapi/v2")
    found = find_faults(objects, openapi, tmp_path)
    assert found["summary"] == {"valid": len(objects), "invalid": 0, "errors": 0, "skipped": 0}
    await apply(cluster.admin, objects, dryRun="All")


def test_each_mode_has_values_for_ci() -> None:
    """Each mode, plain metrics and the webhook have values for CI."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))

    assert {one["mode"] for one in CI.values()} == set(schema["properties"]["mode"]["enum"])
    assert CI.keys() >= {"plain", "admission"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"mode": "sidecar", "tls": {"enabled": False}},
            "needs mode=metrics, not mode=sidecar",
        ),
        ({"admission": {"enabled": True}}, "admission.enabled needs mode=standalone"),
        (
            {
                "mode": "standalone",
                "admission": {"enabled": True},
                "config": {"admission": {"groups": ["x'] || true || 'x' in ['"]}},
            },
            "config.admission.groups",
        ),
        ({"mode": "side-car"}, "mode"),
        ({"podmonitor": {"enabled": True}}, "podmonitor"),
        ({"podMonitor": {"interval": 30}}, "podMonitor"),
        (
            {"prometheusRule": {"enabled": True, "disabled": ["KubeVirtVMChurns"]}},
            "prometheusRule.disabled: there is no alert KubeVirtVMChurns",
        ),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_name(values: Object, said: str) -> None:
    """`helm template` refuses wrong values, and its error names them."""
    refused = template(values)

    assert refused.returncode != 0
    assert said in refused.stderr


async def test_the_webhook_is_called_for_the_groups_of_the_configuration(
    cluster: RealCluster,
) -> None:
    """The webhook is called for the configured groups; the API server accepts its condition."""
    group = "system:serviceaccounts:kube-system"
    values = {
        "mode": "standalone",
        "admission": {"enabled": True},
        "config": {"admission": {"groups": [group]}},
    }
    objects = charted(values)
    (webhook,) = only(objects, "MutatingWebhookConfiguration")["webhooks"]
    conditions = {one["name"]: one["expression"] for one in webhook["matchConditions"]}
    in_group = f"request.userInfo.groups.exists(group, group in ['{group}'])"
    assert conditions["listed-users"].endswith(f"] || {in_group}")
    page = (ROOT / "docs" / "hold-evictions.md").read_text()
    assert in_group.replace(group, "GROUP") in page
    await apply(cluster.admin, objects, dryRun="All")


@pytest.mark.parametrize(
    "values",
    [
        {"admission": {"enabled": True, "observe": True}},
        {"admission": {"enabled": True}, "config": {"admission": {"observe": True}}},
    ],
    ids=["value", "setting"],
)
def test_to_observe_the_webhook_is_called_for_all_users(values: Object) -> None:
    """With `admission.observe` the webhook is called for all users, and the setting is on."""
    objects = charted({"mode": "standalone", **values})
    (webhook,) = only(objects, "MutatingWebhookConfiguration")["webhooks"]
    assert [one["name"] for one in webhook["matchConditions"]] == ["launcher-pods"]
    assert read_settings(config_of(objects)).admission.observe


def test_own_settings_are_merged_over_those_of_the_mode() -> None:
    """`config` is merged over the mode's settings; other settings stay."""
    values = {"mode": "standalone", "config": {"policy": {"migrationCooldown": "1h"}}}
    changed, plain = (
        comparable(charted(one))[f"ConfigMap {NAME}-config"]["data"]["config.yaml"]
        for one in (values, {"mode": "standalone"})
    )

    assert changed["policy"].pop("migrationCooldown") == "1h"
    assert plain["policy"].pop("migrationCooldown") == "15m"
    assert changed == plain


def test_alerts_follow_the_conventions_of_a_site() -> None:
    """Alerts can be left out, labelled, and given other runbooks; recording rules stay."""
    chosen: Object = {
        "disabled": ["KubeVirtVMChurning", "KubeVirtEvictionExporterStale"],
        "additionalLabels": {"release": "ours"},
        "additionalRuleLabels": {"team": "virt", "severity": "page"},
        "runbookUrlPrefix": "https://wiki.example/runbooks/",
    }
    made = only(charted({"prometheusRule": {"enabled": True, **chosen}}), "PrometheusRule")
    expected = load_groups()
    for group in expected["groups"]:
        group["rules"] = [
            one for one in group["rules"] if one.get("alert") not in chosen["disabled"]
        ]
    for name, alert in all_alerts(expected).items():
        alert["labels"] |= chosen["additionalRuleLabels"]
        alert["annotations"]["runbook_url"] = f"https://wiki.example/runbooks/{name}.md"

    assert made["spec"] == expected
    assert made["metadata"]["labels"].items() >= chosen["additionalLabels"].items()


def test_dashboards_of_a_fleet_are_those_of_the_folder() -> None:
    """With `dashboards.fleet` the dashboards are those of `dashboards/fleet`."""
    objects = charted({"dashboards": {"enabled": True, "fleet": True}})
    made = [one["data"] for one in objects if one["metadata"]["labels"].get("grafana_dashboard")]

    assert {name: json.loads(text) for data in made for name, text in data.items()} == {
        path.name: json.loads(path.read_text()) for path in (ROOT / "dashboards/fleet").iterdir()
    }


def test_dashboards_of_perses_are_those_of_kustomize() -> None:
    """`dashboards.perses` adds the objects of `dashboards/perses`."""
    made = [
        (one["metadata"]["name"], one["spec"])
        for one in charted({"dashboards": {"perses": True}})
        if one["kind"] == "PersesDashboard"
    ]

    assert sorted(made) == sorted(
        (one["metadata"]["name"], one["spec"]) for one in build(ROOT / "dashboards/perses")
    )


def test_a_changed_setting_makes_new_pods() -> None:
    """A changed setting changes the ConfigMap's name, so that pods are replaced."""
    names = {
        one["metadata"]["name"]
        for cooldown in ("15m", "1h")
        for one in charted({"config": {"policy": {"migrationCooldown": cooldown}}})
        if one["kind"] == "ConfigMap"
    }

    assert len(names) == 2


def test_every_value_has_a_meaning_and_every_key_a_default() -> None:
    """The schema has the keys of values.yaml, each with a description."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    del schema["properties"]["global"]  # the values of Helm itself

    def same(values: Object, schema: Object) -> bool:
        return values.keys() == schema["properties"].keys() and all(
            same(values[name], one) if "properties" in one else bool(one["description"])
            for name, one in schema["properties"].items()
        )

    assert same(values, schema)
