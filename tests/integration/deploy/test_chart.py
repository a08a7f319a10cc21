"""The Helm chart: it renders what kustomize renders, and a real API server accepts it."""

import itertools
import json
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from exporter.engine.facts.model import Resource
from exporter.settings import read_settings
from tests.cluster import RealCluster, find_binary
from tests.generate.manifests import (
    CHART,
    CHART_COPIES,
    ELSEWHERE,
    NAME,
    NAMESPACE,
    Object,
    build,
    config_of,
    containers,
    localize,
    only,
    overlay,
    pod_templates,
    write_overlay,
)
from tests.generate.rules import RUNBOOK_BASE, all_alerts, load_groups
from tests.integration.deploy.schemas import find_faults
from tests.integration.deploy.server import apply
from tests.support.documents import DEPLOY, INSTALL, ROOT, chapters, code_blocks


KUBERNETES = "1.37.2"
TEN = {"threshold": 10}
CI = [
    yaml.safe_load(path.read_text(encoding="utf-8"))
    for path in sorted((CHART / "ci").glob("*-values.yaml"))
]
TOOL_LABELS = {
    "helm.sh/chart",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/version",
}
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


def lint(values: Object) -> subprocess.CompletedProcess[str]:
    """`helm lint --strict` of our chart with these values."""
    return helm("lint", "--strict", str(CHART), "--values", "-", given=yaml.safe_dump(values))


def charted(values: Object, namespace: str = NAMESPACE) -> tuple[Object, ...]:
    """The objects that the chart renders."""
    made = template(values, namespace)
    assert made.returncode == 0, made.stderr
    return tuple(filter(None, yaml.safe_load_all(made.stdout)))


def comparable(objects: Iterable[Object]) -> dict[str, Object]:
    """The objects by kind and name, without hashes and tool labels, and with parsed ConfigMaps."""
    text = re.sub(r"(-(?:config|descheduler))-[a-z0-9]{10}\b", r"\1", json.dumps([*objects]))
    documents = {}
    for document in json.loads(text):
        labels = document["metadata"].get("labels", {})
        document["metadata"]["labels"] = {k: v for k, v in labels.items() if k not in TOOL_LABELS}
        if document["kind"] == "ConfigMap":
            document["data"] = {
                name: yaml.safe_load(text) for name, text in document["data"].items()
            }
        if document["kind"] == "PodMonitor":  # only kustomize's transformer needs the annotations
            document["metadata"].pop("annotations", None)
        documents[f"{document['kind']} {document['metadata']['name']}"] = document
    return documents


@pytest.mark.parametrize(
    ("mode", "namespace"), [*((mode, ELSEWHERE) for mode in MODES), ("admission", NAMESPACE)]
)
def test_the_chart_renders_what_kustomize_renders(mode: str, namespace: str) -> None:
    """Chart and kustomize render equal objects; only the Namespace is missing from the chart."""
    values, folder, components = MODES[mode]
    scheme = "http" if "plain" in mode else "https"
    served_at = f"{scheme}://{NAME}.{namespace}.svc:9811/runbooks"
    kustomized = overlay(
        {"namespace": namespace},
        resources=[folder, "overlays/monitoring"],
        components=components,
        transformers=["namespace"],
    )
    ours = comparable(charted({**values, **MONITORING}, namespace))
    theirs = comparable(row for row in kustomized if row["kind"] != "Namespace")
    for row in ours.values():  # kustomize cannot change the host of the dashboards' links
        if "grafana_dashboard" in row["metadata"]["labels"]:
            row["data"] = json.loads(json.dumps(row["data"]).replace(served_at, RUNBOOK_BASE))

    assert ours.keys() == theirs.keys()
    for name, document in ours.items():
        assert document == theirs[name], name


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
    added |= {f"{kind} {NAME}-lease" for kind in ("Role", "RoleBinding")}
    assert ours.keys() - without.keys() == added
    assert all(ours[name] == theirs[name] for name in added)


def test_eviction_requests_add_a_setting_and_the_component() -> None:
    """`evictionRequests.mode: respond` adds what the component adds, and `cancel` one rule."""
    values = {"mode": "respond", "cancel": True}
    without = comparable(charted({}))
    ours = comparable(charted({"evictionRequests": values}))
    kustomized = overlay(resources=["base"], components=["components/eviction-requests"])
    theirs = comparable(kustomized)
    config = ours.pop(f"ConfigMap {NAME}-config")["data"]["config.yaml"]
    without.pop(f"ConfigMap {NAME}-config")

    assert config["evictionRequests"] == {**values, "evict": True}
    added = {f"{kind} {NAME}-eviction-requests" for kind in ("ClusterRole", "ClusterRoleBinding")}
    added |= {f"{kind} {NAME}-requests-lease" for kind in ("Role", "RoleBinding")}
    added |= {f"MutatingAdmissionPolicy{kind} {NAME}-responder" for kind in ("", "Binding")}
    assert ours.keys() - without.keys() == added
    *rules, cancels = ours[f"ClusterRole {NAME}-eviction-requests"]["rules"]
    ours[f"ClusterRole {NAME}-eviction-requests"]["rules"] = rules
    assert cancels["apiGroups"] == ["subresources.kubevirt.io"]
    assert all(ours[name] == theirs[name] for name in added)


def test_observing_needs_one_rule() -> None:
    """`evictionRequests.mode: observe` adds the permission to read Evictions, and nothing else."""
    ours = comparable(charted({"evictionRequests": {"mode": "observe"}}))
    assert ours[f"ClusterRole {NAME}-eviction-requests"]["rules"] == [
        {"apiGroups": ["lifecycle.k8s.io"], "resources": ["evictions"], "verbs": ["list", "watch"]}
    ]
    assert not [name for name in ours if name.startswith("MutatingAdmissionPolicy")]


def test_every_object_says_that_helm_made_it() -> None:
    """Every object has the two labels that the comparison ignores."""
    for document in charted(MONITORING):
        assert document["metadata"]["labels"].keys() >= TOOL_LABELS


@pytest.mark.parametrize(
    ("values", "text"),
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
        ({"config": {"foo": 1}}, "at '/config': additional properties 'foo' not allowed"),
        (
            {"config": {"policy": {"migrationCooldown": "banana"}}},
            "at '/config/policy/migrationCooldown': 'banana'",
        ),
        (
            {"config": {"stuck": {"failedAttempts": 0}}},
            "at '/config/stuck/failedAttempts': minimum: got 0, want 1",
        ),
        (
            {"image": {"exporter": {"tag": "sha256:" + "0" * 64}}},
            "at '/image/exporter/tag': 'sha256:",
        ),
        (
            {"image": {"exporter": {"repository": "registry.example:5000/exporter:0.1.0"}}},
            "at '/image/exporter/repository': 'registry.example:5000/exporter:0.1.0'",
        ),
        (
            {"image": {"exporter": {"repository": f"registry.example/exporter@sha256:{'0' * 64}"}}},
            "at '/image/exporter/repository': 'registry.example/exporter@sha256:",
        ),
        (
            {"mode": "sidecar", "descheduler": {"policy": {"kind": "DeschedulerPolicy"}}},
            "descheduler.policy: expected the plugin KubeVirtVerdicts",
        ),
        ({"serviceAccount": {"create": False}}, "serviceAccount.name: expected the name"),
        (
            {"prometheusRule": {"enabled": True, "disabled": ["KubeVirtVMChurns"]}},
            "prometheusRule.disabled: there is no alert KubeVirtVMChurns",
        ),
        (
            {"prometheusRule": {"enabled": True, "alerts": {"KubeVirtVMChurns": {"for": "9m"}}}},
            "prometheusRule.alerts: there is no alert KubeVirtVMChurns",
        ),
        (
            {"prometheusRule": {"enabled": True, "alerts": {"KubeVirtVMChurning": TEN}}},
            "prometheusRule.alerts.KubeVirtVMChurning: this alert has no threshold",
        ),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_name(values: Object, text: str) -> None:
    """`helm template` refuses wrong values, and its error names them."""
    refused = template(values)

    assert refused.returncode != 0
    assert text in refused.stderr


def leaves(schema: Object) -> st.SearchStrategy[Any]:
    """Values of a schema: of each key one of its examples or choices, or none."""
    if "examples" in schema:
        return st.sampled_from(schema["examples"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema.get("type") == "boolean":
        return st.booleans()
    optional = {key: leaves(part) for key, part in schema["properties"].items() if key != "global"}
    return st.fixed_dictionaries({}, optional=optional)


SENTENCES = (
    "tls.enabled=false needs mode=metrics",
    "admission.enabled needs mode=standalone",
    "descheduler.policy: expected the plugin KubeVirtVerdicts",
    "serviceAccount.name: expected the name of an existing account",
    "prometheusRule.disabled: there is no alert KubeVirtVMChurns",
)
"""Why the chart refuses values that its schema accepts."""


async def test_drawn_values_are_accepted_or_refused_with_a_sentence(
    cluster: RealCluster, tmp_path: Path, prove: Callable[[str], None]
) -> None:
    """Of any values from the schema, the API server accepts the objects, or the chart says why.

    It accepts the objects of the values for CI too.
    """
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    openapi = await cluster.admin.request("GET", "/openapi/v2")
    sets: list[Object] = []

    @seed(2611)
    @settings(max_examples=16, database=None, deadline=None, phases=[Phase.generate])
    @given(leaves(schema))
    def draw(values: Object) -> None:
        sets.append(values)

    draw()
    drawn = len(sets)
    sets += CI
    for space in ("shop", "db", "dashboards"):
        await cluster.namespace(space)
    refused = Counter[str]()
    for values in sets:
        made, linted = template(values), lint(values)
        if made.returncode:
            (why,) = [sentence for sentence in SENTENCES if sentence in made.stderr]
            assert why in linted.stderr  # helm lint only reports a template's `fail`
            refused[why] += 1
            continue
        assert not made.stderr, made.stderr
        assert linted.returncode == 0, linted.stdout
        objects = tuple(filter(None, yaml.safe_load_all(made.stdout)))
        read_settings(config_of(objects))
        # The CRD of Perses' operator is not among those that are built here.
        served = tuple(
            document for document in objects if not document["apiVersion"].startswith("perses.dev/")
        )
        report = find_faults(served, openapi, tmp_path)
        assert report["summary"] == {"valid": len(served), "invalid": 0, "errors": 0, "skipped": 0}
        await apply(cluster.admin, served, dryRun="All")
    accepted = drawn - refused.total()
    prove(f"chart: of {drawn} sets of values {accepted} are accepted, refused: {dict(refused)}")
    assert accepted
    assert refused
    assert (drawn, len(sets) - drawn) == (16, 5)


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
    conditions = {row["name"]: row["expression"] for row in webhook["matchConditions"]}
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
    assert [condition["name"] for condition in webhook["matchConditions"]] == ["launcher-pods"]
    assert read_settings(config_of(objects)).admission.observe


def test_own_settings_are_merged_over_those_of_the_mode() -> None:
    """`config` is merged over the mode's settings; other settings stay."""
    values = {"mode": "standalone", "config": {"policy": {"migrationCooldown": "1h"}}}
    changed, plain = (
        comparable(charted(chosen))[f"ConfigMap {NAME}-config"]["data"]["config.yaml"]
        for chosen in (values, {"mode": "standalone"})
    )

    assert changed["policy"].pop("migrationCooldown") == "1h"
    assert plain["policy"].pop("migrationCooldown") == "15m"
    assert changed == plain


def test_alerts_follow_the_conventions_of_a_site() -> None:
    """Alerts can be left out and labelled; recording rules stay."""
    chosen: Object = {
        "disabled": ["KubeVirtVMChurning", "KubeVirtEvictionExporterStale"],
        "additionalLabels": {"release": "ours"},
        "additionalRuleLabels": {"team": "virt", "severity": "page"},
    }
    made = only(charted({"prometheusRule": {"enabled": True, **chosen}}), "PrometheusRule")
    expected = load_groups()
    for group in expected["groups"]:
        group["rules"] = [
            rule for rule in group["rules"] if rule.get("alert") not in chosen["disabled"]
        ]
    for alert in all_alerts(expected).values():
        alert["labels"] |= chosen["additionalRuleLabels"]

    assert made["spec"] == expected
    assert made["metadata"]["labels"].items() >= chosen["additionalLabels"].items()


def test_one_setting_says_where_the_runbooks_are() -> None:
    """Alerts and dashboards lead to `links.runbooks`, which the pages use too."""
    links = {"runbooks": "https://wiki.example/{alert}.html"}
    values = {**MONITORING, "dashboards": {"enabled": True, "perses": True}}
    objects = charted({**values, "config": {"links": links}})
    alerts = all_alerts(only(objects, "PrometheusRule")["spec"])

    assert config_of(objects)["links"] == links
    for name, alert in all_alerts(load_groups()).items():
        url = alert["annotations"]["runbook_url"]
        assert url.startswith(f"{RUNBOOK_BASE}/{name}")
        assert alerts[name]["annotations"]["runbook_url"] == url.replace(
            f"{RUNBOOK_BASE}/{name}", f"https://wiki.example/{name}.html"
        )
    assert "/runbooks/" not in json.dumps(objects)
    assert "https://wiki.example/${__value.text}.html" in json.dumps(objects)


def test_alerts_are_tuned_by_values() -> None:
    """`alerts` sets `for`, severity and threshold of an alert, and nothing else."""
    chosen = {
        "KubeVirtNodeDrainStuck": {"for": "15m", "severity": "critical"},
        "KubeVirtDeschedulerSlotsHeld": TEN,
        "KubeVirtEvacuationsStuckMany": {"threshold": 25},
    }
    made = only(charted({"prometheusRule": {"enabled": True, "alerts": chosen}}), "PrometheusRule")
    expected = load_groups()
    alerts = all_alerts(expected)
    alerts["KubeVirtNodeDrainStuck"]["for"] = "15m"
    alerts["KubeVirtNodeDrainStuck"]["labels"]["severity"] = "critical"
    for name, right, wrong in (
        ("KubeVirtDeschedulerSlotsHeld", ">= 10\n", ">= 5\n"),
        ("KubeVirtEvacuationsStuckMany", ">= 25\n", ">= 10\n"),
    ):
        alerts[name]["expr"] = alerts[name]["expr"].replace(wrong, right)

    assert made["spec"] == expected


def test_the_values_have_the_rules_own_defaults() -> None:
    """Each alert has its `for`, severity and, if it can be changed, threshold of rules.yaml."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())["prometheusRule"]["alerts"]
    expected = {}
    for name, alert in all_alerts(load_groups()).items():
        expected[name] = {"for": alert["for"], "severity": alert["labels"]["severity"]}
        if "threshold" in values[name]:
            (threshold,) = re.findall(r">= (\d+)\s*$", alert["expr"])
            expected[name]["threshold"] = int(threshold)

    assert values == expected


def test_dashboards_of_a_fleet_are_those_of_the_folder() -> None:
    """With `dashboards.fleet` the dashboards are those of `dashboards/fleet`."""
    objects = charted({"dashboards": {"enabled": True, "fleet": True}})
    made = [row["data"] for row in objects if row["metadata"]["labels"].get("grafana_dashboard")]

    assert {name: json.loads(text) for data in made for name, text in data.items()} == {
        path.name: json.loads(path.read_text()) for path in (ROOT / "dashboards/fleet").iterdir()
    }


def test_dashboards_of_perses_are_those_of_kustomize() -> None:
    """`dashboards.perses` adds the objects of `dashboards/perses`."""
    made = [
        (document["metadata"]["name"], document["spec"])
        for document in charted({"dashboards": {"perses": True}})
        if document["kind"] == "PersesDashboard"
    ]

    assert sorted(made) == sorted(
        (row["metadata"]["name"], row["spec"]) for row in build(ROOT / "dashboards/perses")
    )


def test_a_changed_setting_makes_new_pods() -> None:
    """A changed setting changes the ConfigMap's name, so that pods are replaced."""
    names = {
        document["metadata"]["name"]
        for cooldown in ("15m", "1h")
        for document in charted({"config": {"policy": {"migrationCooldown": cooldown}}})
        if document["kind"] == "ConfigMap"
    }

    assert len(names) == 2


def test_values_that_admins_expect_reach_the_pods() -> None:
    """Account, labels, class, volumes and flags are those of the values.

    The test of the documented overlay has the other values.
    """
    values: Object = {
        "mode": "sidecar",
        "image": {"exporter": {"pullPolicy": "Always"}},
        "serviceAccount": {"create": False, "name": "ours"},
        "commonLabels": {"team": "virt", "app.kubernetes.io/name": "mine"},
        "podLabels": {"inject": "false"},
        "priorityClassName": "",
        "extraVolumes": [{"name": "ours", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "ours", "mountPath": "/ours"}],
        "descheduler": {"interval": "5m", "verbosity": 4, "args": ["--dry-run"]},
    }
    objects = charted(values)
    (template,) = pod_templates(objects)
    pod, parts = template["spec"], containers(template)
    exporter, arguments = parts["exporter"], parts["descheduler"]["args"]

    assert exporter["imagePullPolicy"] == "Always"
    assert values["extraVolumes"][0] in pod["volumes"]
    assert values["extraVolumeMounts"][0] in exporter["volumeMounts"]
    assert pod["serviceAccountName"] == "ours"
    assert "priorityClassName" not in pod
    assert template["metadata"]["labels"].items() >= {"team": "virt", "inject": "false"}.items()
    assert {"--descheduling-interval=5m", "--v=4", "--dry-run"} <= set(arguments)
    names = {document["metadata"]["labels"]["app.kubernetes.io/name"] for document in objects}
    assert names == {NAME}
    assert all(document["metadata"]["labels"]["team"] == "virt" for document in objects)
    accounts = [document for document in objects if document["kind"] == "ServiceAccount"]
    assert not accounts
    subjects = {
        subject["name"]
        for document in objects
        if document["kind"].endswith("RoleBinding")
        for subject in document["subjects"]
    }
    assert subjects == {"ours"}


def test_some_namespaces_get_roles_instead_of_a_cluster_role() -> None:
    """With `config.namespaces`, only KubeVirt objects and nodes are read in the whole cluster."""
    objects = charted({"config": {"namespaces": ["shop", "db"]}, "events": {"enabled": True}})
    named = [
        (row["kind"], row["metadata"].get("namespace"), row["metadata"]["name"]) for row in objects
    ]

    everywhere = only(objects, "ClusterRole", f"{NAME}-reader")
    read = {resource for rule in everywhere["rules"] for resource in rule["resources"]}
    assert read == {"kubevirts", "nodes"}
    for role, space in itertools.product(("reader", "events"), ("shop", "db")):
        assert ("Role", space, f"{NAME}-{role}") in named
        assert ("RoleBinding", space, f"{NAME}-{role}") in named
    assert ("ClusterRole", None, f"{NAME}-events") not in named


def test_the_role_has_other_names_of_kubevirt() -> None:
    """The documented settings and the documented patch give the same role, with all names."""
    values, patches = map(
        yaml.safe_load, code_blocks(chapters(INSTALL)["KubeVirt under other names"], "yaml")
    )
    role, patched = (
        only(objects, "ClusterRole", f"{NAME}-reader")["rules"]
        for objects in (charted({"config": values}), overlay(patches, resources=["base"]))
    )

    assert role == patched
    names = read_settings(values).kubevirt
    assert role[0]["apiGroups"] == [names.api_group]
    assert role[0]["resources"] == [
        names.write_resource(resource)
        for resource in (Resource.VMIS, Resource.VMIMS, Resource.KUBEVIRTS)
    ]


def site_values(digest: str) -> Object:
    """Values as a site sets them, the same as in the overlay of deploy/README.md."""
    infra = {"matchExpressions": [{"key": "node-role.kubernetes.io/infra", "operator": "Exists"}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [infra]}}
    scrapers = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))["networkPolicy"]
    return {
        "mode": "standalone",
        "image": {"exporter": {"digest": digest}},
        "commonLabels": {"team": "virtualization"},
        "config": {"namespaces": ["shop", "db"]},
        "replicas": 3,
        "priorityClassName": "infrastructure",
        "affinity": {"nodeAffinity": required},
        "podAnnotations": {"example.org/owner": "virtualization"},
        "extraEnv": [{"name": "TZ", "value": "Europe/Berlin"}],
        "serviceAccount": {"annotations": {"example.org/owner": "virtualization"}},
        "networkPolicy": {"scrapers": [*scrapers["scrapers"], "observability"]},
    }


def test_the_documented_overlay_does_what_the_values_do(tmp_path: Path) -> None:
    """The overlay of deploy/README.md renders what the chart renders with the named values."""
    kustomization, role = code_blocks(chapters(DEPLOY)["The chart's values with kustomize"], "yaml")
    own, folders = localize(yaml.safe_load(kustomization))
    write_overlay(tmp_path, own, **folders)
    begun = (CHART / "files/config/standalone.yaml").read_text(encoding="utf-8")
    (tmp_path / "config.yaml").write_text(f"{begun}namespaces: [shop, db]\n", encoding="utf-8")

    values = site_values("sha256:" + "0123456789abcdef" * 4)
    roles = f"{role}---\n{role.replace('namespace: shop', 'namespace: db')}"
    ours, theirs = charted(values), [*build(tmp_path), *yaml.safe_load_all(roles)]

    for place in (None, NAMESPACE, "shop", "db"):
        made, documented = (
            comparable(
                row
                for row in objects
                if row["metadata"].get("namespace") == place and row["kind"] != "Namespace"
            )
            for objects in (ours, theirs)
        )
        assert made.keys() == documented.keys()
        for name, document in made.items():
            assert document == documented[name], name


def test_the_files_of_the_chart_are_copies() -> None:
    """Each file that Helm reads equals the file that kustomize uses; `make manifests` copies it."""
    for copy, source in CHART_COPIES.items():
        assert copy.read_bytes() == source.read_bytes(), copy
        assert not copy.is_symlink()
    files = {path for path in (CHART / "files").rglob("*") if path.is_file()}
    assert files == CHART_COPIES.keys()


def test_every_value_has_a_meaning_and_every_key_a_default() -> None:
    """The schema has the keys of values.yaml, each with a description."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    del schema["properties"]["global"]  # the values of Helm itself

    def same(values: Object, schema: Object) -> bool:
        return values.keys() == schema["properties"].keys() and all(
            same(values[name], part) if "properties" in part else bool(part["description"])
            for name, part in schema["properties"].items()
        )

    assert same(values, schema)
