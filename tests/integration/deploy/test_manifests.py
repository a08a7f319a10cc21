"""The rendered manifests, tested without a cluster: their parts must match."""

import json
import re
from typing import Any

import pytest
import yaml

from exporter.metrics.exposition import FAMILIES
from exporter.settings import Authentication, Limits, Settings, read_settings
from tests.generate.manifests import (
    ADDITIONS,
    DEPLOY,
    DERIVED,
    DESCHEDULER_IMAGE,
    ELSEWHERE,
    ENCRYPTED,
    EXPORTER_IMAGE,
    NAME,
    NAMESPACE,
    OVERLAYS,
    PLAIN,
    POLICY,
    POLICY_COPY,
    ROOT,
    TLS_SECRET,
    VALUES,
    Object,
    config_of,
    containers,
    derive_values,
    localize,
    only,
    overlay,
    pod_templates,
    render,
    render_chart,
)
from tests.generate.rules import RUNBOOK_BASE
from tests.support.documents import OPERATE, read


SELECTED = {"app.kubernetes.io/name": NAME}
SERVED_AS = f"{NAME}.{NAMESPACE}.svc"
"""The host name that callers in other pods use, and that the certificate must have."""
SOCKET_FOLDER = "/run/eviction-exporter"
EVERYTHING = (*OVERLAYS, *ADDITIONS)


def settings_of(folder: str) -> Settings:
    """The exporter's settings in an overlay."""
    return read_settings(config_of(render(folder)))


def plugin_arguments(policy: Object) -> Object:
    """The arguments of the plugin KubeVirtVerdicts in the policy."""
    configured: list[Object] = [
        plugin["args"]
        for profile in policy["profiles"]
        for plugin in profile["pluginConfig"]
        if plugin["name"] == "KubeVirtVerdicts"
    ]
    assert len(configured) == 1
    return configured[0]


def references(objects: tuple[Object, ...]) -> set[tuple[str, str]]:
    """The objects that these objects refer to."""
    named = set()
    for document in objects:
        if "roleRef" in document:
            named.add((document["roleRef"]["kind"], document["roleRef"]["name"]))
            named |= {
                (subject["kind"], subject["name"])
                for subject in document["subjects"]
                if subject["namespace"] == NAMESPACE
            }
    for template in pod_templates(objects):
        named.add(("ServiceAccount", template["spec"]["serviceAccountName"]))
        for volume in template["spec"]["volumes"]:
            if "configMap" in volume:
                named.add(("ConfigMap", volume["configMap"]["name"]))
            if "secret" in volume:
                named.add(("Secret", volume["secret"]["secretName"]))
    return named


def identities(objects: tuple[Object, ...]) -> list[tuple[str, str]]:
    """The kind and name of each object."""
    return [(document["kind"], document["metadata"]["name"]) for document in objects]


def test_what_is_derived_is_up_to_date() -> None:
    """`make manifests` would change nothing."""
    values = VALUES.read_text(encoding="utf-8")

    for path, derive in DERIVED.items():
        text = path.read_text(encoding="utf-8")
        assert text == derive(text), path
    assert POLICY_COPY.read_bytes() == POLICY.read_bytes()
    assert values == derive_values(values)


@pytest.mark.parametrize("folder", EVERYTHING)
def test_only_the_release_s_images_are_pulled(folder: str) -> None:
    """Every overlay has the images of this version, and no tag such as `latest`."""
    wanted = {"exporter": EXPORTER_IMAGE, "descheduler": DESCHEDULER_IMAGE}
    texts = {
        name: container["image"]
        for template in pod_templates(render(folder))
        for name, container in containers(template).items()
    }

    assert texts == {name: wanted[name] for name in texts}
    assert ("exporter" in texts) == (folder in OVERLAYS)
    assert ("descheduler" in texts) == (folder == "overlays/sidecar")
    assert not re.search(
        r"localhost[:/]|:latest|imagePullPolicy", yaml.safe_dump_all(render(folder))
    )


@pytest.mark.parametrize("folder", OVERLAYS)
def test_everything_named_is_there(folder: str) -> None:
    """Every role, account and ConfigMap that an object names exists once.

    Only the certificate's Secret is missing, because it is created first.
    """
    made = identities(render(folder))

    first = {("Secret", TLS_SECRET)} if folder in ENCRYPTED else set()
    assert references(render(folder)) - set(made) == first
    assert len(made) == len(set(made))


@pytest.mark.parametrize("folder", EVERYTHING)
def test_everything_is_in_its_namespace_and_labelled(folder: str) -> None:
    """Every object is in the namespace and has the label that the runbooks use."""
    for document in render(folder):
        place = document["metadata"].get("namespace", NAMESPACE)
        assert place == NAMESPACE, document["metadata"]
        assert document["metadata"]["labels"].items() >= SELECTED.items(), document["metadata"]


@pytest.mark.parametrize("folder", OVERLAYS)
def test_additions_collide_with_nothing(folder: str) -> None:
    """`monitoring` can be applied to any installation that does not have it."""
    both = identities(render(folder)) + identities(render("overlays/monitoring"))
    doubles = {pair for pair in both if both.count(pair) > 1}

    assert doubles == (
        set(identities(render("overlays/monitoring"))) if folder.endswith("openshift") else set()
    )


@pytest.mark.parametrize("folder", OVERLAYS)
def test_configurations_are_valid(folder: str) -> None:
    """The exporter accepts every configuration, and has no remarks about it."""
    settings = settings_of(folder)

    window, cap = settings.policy.migration_history_window, settings.policy.max_migration_cooldown
    assert window > 6 * cap
    assert settings.remarks == ()


@pytest.mark.parametrize("folder", OVERLAYS)
def test_ports_and_probes_fit_the_listeners(folder: str) -> None:
    """Container ports, probes and NetworkPolicies have the ports of the listeners."""
    objects, settings = render(folder), settings_of(folder)
    exporter = containers(only(objects, "Deployment")["spec"]["template"])["exporter"]
    named = {port["name"]: port["containerPort"] for port in exporter["ports"]}
    admitted = {
        port["port"]
        for rule in only(objects, "NetworkPolicy")["spec"]["ingress"]
        for port in rule["ports"]
    }
    open_query = {address.port for address in settings.listen.query if not address.is_local}

    assert named["metrics"] == settings.listen.metrics[0].port
    assert {named["query"]} == open_query if open_query else "query" not in named
    started = "/readyz" if folder == "overlays/sidecar" else "/livez"
    for probe, path in (("startup", started), ("liveness", "/livez"), ("readiness", "/readyz")):
        scheme = "HTTPS" if folder in ENCRYPTED else "HTTP"
        wanted = {"path": path, "port": "metrics", "scheme": scheme}
        assert exporter[f"{probe}Probe"]["httpGet"] == wanted
    assert admitted - {10258} == set(named.values())
    assert (10258 in admitted) == (folder == "overlays/sidecar")


@pytest.mark.parametrize("folder", OVERLAYS)
def test_selectors_select_the_pods(folder: str) -> None:
    """The selectors of all objects select the same pods."""
    text = yaml.safe_dump_all(render(folder))
    template = only(render(folder), "Deployment")["spec"]["template"]
    selectors: list[Any] = [
        document["spec"].get("selector", document["spec"].get("podSelector"))
        for document in render(folder)
        if "spec" in document and document["kind"] not in {"PrometheusRule", "Namespace"}
    ]
    selectors += [
        rule["labelSelector"] for rule in template["spec"].get("topologySpreadConstraints", [])
    ]

    assert template["metadata"]["labels"].items() >= SELECTED.items()
    assert all(selector.get("matchLabels", selector) == SELECTED for selector in selectors)
    assert ("topologySpreadConstraints" in text) == ("replicas: 2" in text)
    assert ("PodDisruptionBudget" in text) == ("replicas: 2" in text)


def test_sidecar_and_descheduler_meet_on_the_socket() -> None:
    """The plugin's URL is the socket that the exporter opens, in a volume that both mount."""
    template = only(render("overlays/sidecar"), "Deployment")["spec"]["template"]
    settings = settings_of("overlays/sidecar")
    policy = yaml.safe_load(POLICY.read_text(encoding="utf-8"))
    sidecar, descheduler = (containers(template)[name] for name in ("exporter", "descheduler"))
    mounts = [
        {mount["mountPath"]: mount for mount in container["volumeMounts"]}[SOCKET_FOLDER]
        for container in (sidecar, descheduler)
    ]
    volume = {volume["name"]: volume for volume in template["spec"]["volumes"]}[mounts[0]["name"]]

    assert plugin_arguments(policy)["urlPrefix"] == str(settings.listen.query[0])
    assert str(settings.listen.query[0]) == f"unix:{SOCKET_FOLDER}/query.sock"
    assert "emptyDir" in volume
    assert mounts[0]["name"] == mounts[1]["name"]
    assert "readOnly" not in mounts[0]
    assert mounts[1]["readOnly"]
    assert template["spec"]["securityContext"]["runAsUser"] > 0
    assert not any("runAsUser" in row["securityContext"] for row in (sidecar, descheduler))


def test_the_chart_makes_the_same_pod() -> None:
    """The descheduler's own chart with our values makes the pod of the sidecar overlay."""
    ours = only(render("overlays/sidecar"), "Deployment")["spec"]["template"]
    theirs = only(render_chart(), "Deployment")["spec"]["template"]
    policy = only(render_chart(), "ConfigMap")["data"]["policy.yaml"]
    flags = [set(containers(template)["descheduler"]["args"]) for template in (ours, theirs)]

    volumes = [
        {volume["name"]: volume for volume in template["spec"]["volumes"]}
        for template in (ours, theirs)
    ]
    for name in (mount["name"] for mount in containers(ours)["exporter"]["volumeMounts"]):
        mine = json.loads(
            re.sub(r"-config-[a-z0-9]{10}\b", "-config", json.dumps(volumes[0][name]))
        )
        assert volumes[1][name] == mine
    assert containers(theirs)["exporter"] == containers(ours)["exporter"]
    assert containers(theirs)["descheduler"]["image"] == DESCHEDULER_IMAGE
    assert theirs["spec"]["initContainers"][0]["name"] == "exporter"
    assert flags[1] == {flag.replace("$(POD_NAMESPACE)", NAMESPACE) for flag in flags[0]}
    for key in ("securityContext", "serviceAccountName", "priorityClassName", "nodeSelector"):
        assert theirs["spec"][key] == ours["spec"][key]
    assert theirs["metadata"]["labels"].items() >= SELECTED.items()
    assert "--feature-gates=EvictionsInBackground=true" in flags[0]
    assert yaml.safe_load(policy) == yaml.safe_load(POLICY.read_text(encoding="utf-8"))


def test_the_chart_and_what_goes_with_it_are_whole() -> None:
    """The descheduler's chart and deploy/helm have the overlay's kinds, and no object twice."""
    together = (*render("helm"), *render_chart())
    made = identities(together)

    assert len(made) == len(set(made))
    assert references(together) - set(made) == {("Secret", TLS_SECRET)}
    # The chart grants the Lease of the descheduler's leader by a ClusterRole.
    wanted = {document["kind"] for document in render("overlays/sidecar")} - {"Role", "RoleBinding"}
    assert {kind for kind, _ in made} == wanted


def test_prometheus_finds_the_ports_and_keeps_the_vms_labels() -> None:
    """The monitors have the ports of the pods, and the label `namespace` stays that of the VM."""
    objects = render("overlays/monitoring")
    template = only(render("overlays/sidecar"), "Deployment")["spec"]["template"]
    ports = {
        port["name"] for container in containers(template).values() for port in container["ports"]
    }
    monitors = [document["spec"] for document in objects if document["kind"] == "PodMonitor"]
    endpoints = [endpoint for monitor in monitors for endpoint in monitor["podMetricsEndpoints"]]

    assert {endpoint["port"] for endpoint in endpoints} == ports
    assert all(endpoint["honorLabels"] for endpoint in endpoints)
    assert all(monitor["selector"]["matchLabels"] == SELECTED for monitor in monitors)


def test_prometheus_shows_its_token_to_the_exporter_alone() -> None:
    """Prometheus verifies the Service's name by TLS, and sends a token for /metrics only."""
    objects = render("overlays/monitoring")
    (endpoint,) = only(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    credentials = endpoint["authorization"]["credentials"]
    secret = only(objects, "Secret", credentials["name"])
    account = secret["metadata"]["annotations"]["kubernetes.io/service-account.name"]
    (bound,) = (document for document in objects if document["kind"] == "ClusterRoleBinding")
    role = only(render("base"), "ClusterRole", bound["roleRef"]["name"])

    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {
        "serverName": SERVED_AS,
        "ca": {"secret": {"name": TLS_SECRET, "key": "ca.crt"}},
    }
    assert (secret["type"], credentials["key"]) == ("kubernetes.io/service-account-token", "token")
    assert only(objects, "ServiceAccount", account)["automountServiceAccountToken"] is False
    assert [subject["name"] for subject in bound["subjects"]] == [account]
    assert role["rules"] == [{"nonResourceURLs": ["/metrics"], "verbs": ["get"]}]


def test_openshift_s_authority_is_known_to_its_prometheus() -> None:
    """The service CA issues the Service's certificate, and adds the CA to a ConfigMap."""
    objects = render("overlays/openshift")
    service, known = only(objects, "Service"), only(objects, "ConfigMap", f"{NAME}-ca")
    (endpoint,) = only(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    annotations = service["metadata"]["annotations"]

    assert annotations["service.beta.openshift.io/serving-cert-secret-name"] == TLS_SECRET
    assert known["metadata"]["annotations"]["service.beta.openshift.io/inject-cabundle"] == "true"
    assert endpoint["tlsConfig"] == {
        "serverName": SERVED_AS,
        "ca": {"configMap": {"name": f"{NAME}-ca", "key": "service-ca.crt"}},
    }


@pytest.mark.parametrize("folder", ENCRYPTED)
def test_what_the_network_reaches_is_encrypted_and_asks_who_it_is(folder: str) -> None:
    """Each listener on a network address has TLS and Kubernetes' authentication."""
    settings = settings_of(folder)
    listeners = [
        (settings.listen.query, settings.tls_query, settings.auth.query),
        (settings.listen.metrics, settings.tls_metrics, settings.auth.metrics),
    ]
    for addresses, tls, auth in listeners:
        exposed = not all(address.is_local for address in addresses)
        assert (tls.cert_file is not None) == exposed
        assert (auth is Authentication.KUBERNETES) == exposed
    assert not settings.auth.allow_insecure_query


def test_the_certificate_has_the_service_s_names() -> None:
    """Certificates of cert-manager and openssl have the Service's names and `localhost`."""
    objects = render("components/cert-manager")
    certificate = only(objects, "Certificate")["spec"]
    authority = only(objects, "Certificate", f"{NAME}-authority")["spec"]
    recipe = (DEPLOY / "certificate.cnf").read_text(encoding="utf-8")

    assert certificate["dnsNames"] == [SERVED_AS, f"{SERVED_AS}.cluster.local", "localhost"]
    names = recipe.replace("${ENV::NAMESPACE}", NAMESPACE)
    assert re.findall(r"^DNS\.\d+ = (.*)$", names, re.MULTILINE) == certificate["dnsNames"]
    assert only(render("overlays/standalone"), "Service")["metadata"]["name"] == NAME
    assert certificate["secretName"] == TLS_SECRET
    assert authority["isCA"]
    for issued in (certificate, authority):
        assert issued["issuerRef"]["name"] in {made for kind, made in identities(objects)}
    assert only(objects, "Issuer")["spec"] == {"ca": {"secretName": authority["secretName"]}}


def test_no_scrape_is_refused_for_its_size() -> None:
    """The sample limit is at least 20 % above the number that `limits.vmiSeries` allows."""
    per_vmi = sum({"namespace", "name"} <= set(family.labels) for family in FAMILIES)
    limit = only(render("overlays/monitoring"), "PodMonitor")["spec"]["sampleLimit"]

    assert limit >= 1.2 * per_vmi * Limits().vmi_series


ADMISSION = "overlays/admission"


def test_the_webhook_s_configuration_is_standalone_s_and_more() -> None:
    """Apart from its settings for the webhook, `admission` is configured like `standalone`."""
    plain, more = (config_of(render(folder)) for folder in ("overlays/standalone", ADMISSION))
    own = more.pop("admission")
    port = more["listen"].pop("admission")
    assert more["tls"].pop("admission") == more["tls"]["query"]

    assert plain == more
    assert own["mode"] == "warn"
    assert port == "0.0.0.0:9812"


def test_the_webhook_s_users_are_those_of_the_configuration() -> None:
    """The API server calls the webhook for the listed users only."""
    (webhook,) = only(render(ADMISSION), "MutatingWebhookConfiguration")["webhooks"]
    pods, users = webhook["matchConditions"]

    assert pods["expression"] == "request.name.startsWith('virt-launcher-')"
    assert re.findall(r"'([^']+)'", users["expression"]) == [
        *settings_of(ADMISSION).admission.users
    ]


def test_to_observe_the_webhook_is_called_for_all_users() -> None:
    """The component removes the condition on users, and changes nothing else."""
    observing = overlay(resources=[ADMISSION], components=["components/admission-observe"])
    (listing,) = only(render(ADMISSION), "MutatingWebhookConfiguration")["webhooks"]
    (webhook,) = only(observing, "MutatingWebhookConfiguration")["webhooks"]

    pods, _ = listing["matchConditions"]
    assert webhook == listing | {"matchConditions": [pods]}


def test_the_webhook_judges_no_eviction_of_the_cluster_s_own_pods() -> None:
    """The API server does not call the webhook in the exporter's namespace and in kube-system."""
    (webhook,) = only(render(ADMISSION), "MutatingWebhookConfiguration")["webhooks"]
    (selector,) = webhook["namespaceSelector"]["matchExpressions"]

    assert (selector["operator"], selector["values"]) == ("NotIn", [NAMESPACE, "kube-system"])


def test_who_tells_the_api_server_the_webhook_s_authority() -> None:
    """The webhook's CA comes from cert-manager, or on OpenShift from the service CA."""
    made = only(render("components/cert-manager"), "Certificate")["metadata"]
    annotations = only(render(ADMISSION), "MutatingWebhookConfiguration")["metadata"]["annotations"]
    assert annotations == {"cert-manager.io/inject-ca-from": f"{made['namespace']}/{made['name']}"}

    page = (ROOT / "docs/hold-evictions.md").read_text(encoding="utf-8")
    shown = re.search(r"^ *```yaml\n(.*?)^ *```$", page, re.DOTALL | re.MULTILINE)
    assert shown is not None
    document = yaml.safe_load(shown[1])
    own, folders = localize(document)
    objects = overlay(own, **folders)
    webhook = only(objects, "MutatingWebhookConfiguration")

    assert webhook["metadata"]["annotations"] == {
        "service.beta.openshift.io/inject-cabundle": "true"
    }
    assert settings_of(ADMISSION) == read_settings(config_of(objects))


@pytest.mark.parametrize("folder", OVERLAYS)
def test_the_kubelet_waits_longer_than_the_exporter(folder: str) -> None:
    """The first list times out before the kubelet kills the exporter, as documented."""
    exporter = containers(only(render(folder), "Deployment")["spec"]["template"])["exporter"]
    probe = exporter["startupProbe"]
    allowed = probe["periodSeconds"] * probe["failureThreshold"]
    documented = re.search(r"above (\d+) minutes also the `failureThreshold`", read(OPERATE))
    assert documented is not None

    assert settings_of(folder).kube.sync_timeout < 60 * int(documented[1]) < allowed


def test_plain_metrics_need_no_certificate_and_no_token() -> None:
    """`plain` is `base` without certificate and token; the PodMonitor uses neither."""
    less = overlay(
        resources=["base", "overlays/monitoring"], components=["components/plain-metrics"]
    )
    gone = {*identities(render("base")), *identities(render("overlays/monitoring"))}
    gone -= set(identities(less))
    (endpoint,) = only(less, "PodMonitor")["spec"]["podMetricsEndpoints"]

    assert {name for kind, name in gone if kind != "ConfigMap"} == {
        f"{NAME}-reviewer",
        f"{NAME}-scraper",
    }
    assert endpoint == {"port": "metrics", "interval": "30s", "honorLabels": True}
    plain, encrypted = (config_of(render(folder)) for folder in (PLAIN, "base"))
    assert {**plain, "tls": encrypted["tls"], "auth": encrypted["auth"]} == encrypted


def test_another_namespace_is_everywhere() -> None:
    """With the transformer, `namespace:` changes every object and reference of OpenShift's overlay.

    test_chart.py compares the other overlays in another namespace with the chart.
    """
    folder = "overlays/openshift"
    here = (*render(folder), *render("components/cert-manager"))
    moved = overlay(
        {"namespace": ELSEWHERE},
        transformers=["namespace"],
        resources=[folder],
        components=["components/cert-manager"],
    )
    # kustomize cannot change the links of the dashboards, which are text; docs/install.md says so.
    text = yaml.safe_dump_all(moved, width=10_000).replace(f"{RUNBOOK_BASE}/${{__value", "")

    assert {document["metadata"].get("namespace", ELSEWHERE) for document in moved} == {ELSEWHERE}
    assert only(moved, "Namespace", ELSEWHERE)
    assert len(moved) == len(set(identities(here)))
    assert not re.search(rf"(?<!name: ){NAMESPACE}\.{NAMESPACE}\b|{NAMESPACE}/{NAMESPACE}", text)
    assert f"namespace: {NAMESPACE}" not in text
    for document in moved:
        for subject in document.get("subjects", []):
            ours = subject["name"].startswith(NAME)
            assert subject["namespace"] == (ELSEWHERE if ours else "openshift-monitoring")
    assert f"{NAME}.{ELSEWHERE}.svc" in str(only(moved, "Certificate"))
