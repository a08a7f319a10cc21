"""Renders the folders of `deploy/`, and writes the files there that are derived from others.

`python -m tests.generate.manifests` (`make manifests`) writes the version into each file that has
it. It also writes the copy of the descheduler's policy, and the table of our chart's values. For
the descheduler's chart it writes the values that repeat the sidecar overlay and the policy.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import yaml

from exporter import __version__
from tests.cluster.binaries import find_binary
from tests.generate import REPOSITORY
from tests.generate.settings_schema import build_schema


Object: TypeAlias = dict[str, Any]

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
REGISTRY = "quay.io/kubevirt-eviction-exporter"
"""Where the images are published. Change it only here."""
REMOTE = f"{REPOSITORY}//deploy/"
"""The prefix of the URLs of `deploy/` folders in a user's kustomization.yaml."""
EXPORTER_IMAGE = f"{REGISTRY}/exporter:{__version__}"
DESCHEDULER_IMAGE = f"{REGISTRY}/descheduler:{__version__}"
NAME = NAMESPACE = "kubevirt-eviction-exporter"

ENCRYPTED = (
    "base",
    "overlays/sidecar",
    "overlays/standalone",
    "overlays/admission",
    "overlays/openshift",
)
PLAIN = "overlays/plain"
"""The overlay without a certificate."""
OVERLAYS = (*ENCRYPTED, PLAIN)
"""Each overlay is a complete installation."""
ADDITIONS = (
    "overlays/monitoring",
    "helm",
    "components/cert-manager",
    "components/events",
    "components/eviction-requests",
)
"""Each folder is used together with an overlay or another chart."""

TLS_SECRET = f"{NAME}-tls"
"""The Secret with the certificate, which openssl, cert-manager or OpenShift creates."""

IMAGES = DEPLOY / "components/images/kustomization.yaml"
POLICY = DEPLOY / "descheduler/policy.yaml"
POLICY_COPY = DEPLOY / "components/descheduler/policy.yaml"
VALUES = DEPLOY / "helm/values.yaml"
CHART = DEPLOY / "helm/kubevirt-eviction-exporter"
ELSEWHERE = "virt-evictions"
"""A namespace other than our default."""
_BOARDS = tuple(f"kubevirt-eviction-{name}.json" for name in ("overview", "trends", "vm"))
CHART_COPIES = {
    CHART / "files" / copy: ROOT / source
    for copy, source in {
        "policy.yaml": "deploy/descheduler/policy.yaml",
        "prometheusrule.yaml": "alerts/prometheusrule.yaml",
        "config/admission.yaml": "deploy/components/admission/config.yaml",
        "config/metrics.yaml": "deploy/base/config.yaml",
        "config/plain.yaml": "deploy/components/plain-metrics/config.yaml",
        "config/sidecar.yaml": "deploy/overlays/sidecar/config.yaml",
        "config/standalone.yaml": "deploy/overlays/standalone/config.yaml",
        **{f"dashboards/{board}": f"dashboards/{board}" for board in _BOARDS},
        **{f"dashboards/fleet/{board}": f"dashboards/fleet/{board}" for board in _BOARDS},
        **{f"dashboards/perses/{board}": f"dashboards/perses/{board}" for board in _BOARDS},
    }.items()
}
"""The files of the chart that are copies, because Helm reads no file outside of a chart."""
_VALUES_HEAD = "| value | default | meaning |\n|---|---|---|\n"
_IN_BOTH = (
    "# Derived from ../overlays/sidecar and ../descheduler/policy.yaml by `make manifests`.\n"
)


class _Dumper(yaml.SafeDumper):
    """Indents lists as the rest of our YAML does."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: FBT002
        del indentless
        super().increase_indent(flow, indentless=False)


@cache
def render(folder: str, namespace: str = NAMESPACE) -> tuple[Object, ...]:
    """The objects that kustomize renders from a folder of `deploy/`, in the given namespace."""
    if namespace == NAMESPACE:
        return build(DEPLOY / folder)
    return overlay({"namespace": namespace}, resources=[folder], transformers=["namespace"])


def overlay(more: Object | None = None, **folders: list[str]) -> tuple[Object, ...]:
    """Build an overlay outside `deploy/` from these folders of `deploy/`; returns its objects."""
    with TemporaryDirectory() as directory:
        write_overlay(Path(directory), more, **folders)
        return build(Path(directory))


def write_overlay(place: Path, more: Object | None = None, **folders: list[str]) -> None:
    """Write the overlay into a folder."""
    named = {
        kind: [os.path.relpath(DEPLOY / folder, place.resolve()) for folder in listed]
        for kind, listed in folders.items()
    }
    (place / "kustomization.yaml").write_text(yaml.safe_dump({**named, **(more or {})}))


def localize(document: Object) -> tuple[Object, dict[str, list[str]]]:
    """A user's kustomization.yaml, with local folders in place of URLs."""
    kinds = ("resources", "components", "transformers")
    tag = f"?ref=v{__version__}"
    folders = {
        kind: [url.removeprefix(REMOTE).removesuffix(tag) for url in document[kind]]
        for kind in kinds
        if kind in document
    }
    return {key: value for key, value in document.items() if key not in kinds}, folders


def build(folder: Path) -> tuple[Object, ...]:
    """The objects that kustomize renders from a folder. It must print no warning."""
    command = [str(find_binary("kustomize")), "build", str(folder)]
    made = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (made.returncode, made.stderr) == (0, ""), made.stderr
    return tuple(yaml.safe_load_all(made.stdout))


@cache
def render_chart() -> tuple[Object, ...]:
    """The objects of the descheduler's own chart with our values."""
    command = [str(find_binary("helm")), "template", "descheduler", str(chart())]
    command += ["--namespace", NAMESPACE, "--values", str(VALUES)]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    return tuple(filter(None, yaml.safe_load_all(made.stdout)))


@cache
def chart() -> Path:
    """The folder of the chart in the Go module of the descheduler that we build."""
    command = ["go", "mod", "download", "-json", "sigs.k8s.io/descheduler"]
    module = subprocess.run(command, check=True, capture_output=True, cwd=DEPLOY / "descheduler")
    return Path(json.loads(module.stdout)["Dir"]) / "charts/descheduler"


def only(objects: tuple[Object, ...], kind: str, name: str = NAME) -> Object:
    """The only object of this kind and name. The name may end with a generated hash."""
    fitting = [
        document
        for document in objects
        if document["kind"] == kind
        and re.fullmatch(re.escape(name) + "(-[a-z0-9]{10})?", document["metadata"]["name"])
    ]
    assert len(fitting) == 1, f"{len(fitting)} of {kind} {name}"
    return fitting[0]


def pod_templates(objects: tuple[Object, ...]) -> list[Object]:
    """The pod templates of the objects."""
    return [row["spec"]["template"] for row in objects if "template" in row.get("spec", {})]


def containers(template: Object) -> dict[str, Object]:
    """All containers of a pod by name."""
    spec = template["spec"]
    return {row["name"]: row for row in spec.get("initContainers", []) + spec["containers"]}


def config_of(objects: tuple[Object, ...]) -> Object:
    """The exporter's configuration in the objects."""
    text = only(objects, "ConfigMap", f"{NAME}-config")["data"]["config.yaml"]
    document: Object = yaml.safe_load(text)
    return document


def derive_images(text: str) -> str:
    """The images with this version's tag."""
    return re.sub(r"(?<=newTag: ).*", __version__, text)


def derive_values(text: str) -> str:
    """The values in deploy/helm: the handwritten part with this version, then the derived part."""
    own, marker, _ = text.partition(_IN_BOTH)
    assert marker, f"{VALUES} has no line {_IN_BOTH!r}"
    sidecar = pod_templates(render("overlays/sidecar"))[0]["spec"]["initContainers"]
    dumped = yaml.dump({"initContainers": sidecar}, Dumper=_Dumper, sort_keys=False)
    version, policy = derive_policy_values(POLICY.read_text(encoding="utf-8"))
    return (
        re.sub(r"(?<=^  tag: ).*", __version__, own, flags=re.MULTILINE)
        + marker
        + dumped
        + f"deschedulerPolicyAPIVersion: {version}\n"
        + f"deschedulerPolicy:\n{policy}"
    )


def derive_policy_values(text: str) -> tuple[str, str]:
    """The API version of a policy, and its body, indented and without comments."""
    head, kind, body = text.partition("kind: DeschedulerPolicy\n")
    version = re.search(r"^apiVersion: (\S+)$", head, re.MULTILINE)
    assert kind
    assert version
    bare = re.sub(r"^ *#.*\n", "", body, flags=re.MULTILINE)
    return version[1].strip('"'), re.sub(r"^(?=.)", "  ", bare, flags=re.MULTILINE)


def derive_chart(text: str) -> str:
    """Chart.yaml with this version, also in the tags of the images."""
    text = re.sub(r"^(version|appVersion): .*", rf"\1: {__version__}", text, flags=re.MULTILINE)
    return re.sub(rf"(?<=image: )({REGISTRY}/\w+):.*", rf"\1:{__version__}", text)


def derive_chart_readme(text: str) -> str:
    """The chart's README with a row for each value: key, default and meaning."""
    head, marker, rest = text.partition(_VALUES_HEAD)
    _, blank, tail = rest.partition("\n\n")
    assert marker
    assert blank
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    rows = [
        f"| `{key}` | {_show_default(default)} | {meaning} |\n"
        for key, default, meaning in _list_values("", values, schema)
    ]
    return head + marker + "".join(rows) + "\n" + tail


def _show_default(default: Any) -> str:
    """A value's default as JSON; a table of them is in values.yaml."""
    text = json.dumps(default)
    return f"`{text}`" if len(text) < 300 else "see `values.yaml`"


def _list_values(prefix: str, values: Object, schema: Object) -> Iterator[tuple[str, Any, str]]:
    """Key, default and meaning of every value without nested values."""
    for name, value in values.items():
        about = schema["properties"][name]
        if "properties" in about:
            yield from _list_values(f"{prefix}{name}.", value, about)
        else:
            yield f"{prefix}{name}", value, about["description"]


def derive_schema(text: str) -> str:
    """The schema of the chart's values, with every key of the configuration and its type."""
    head, marker, _ = text.rpartition('  "definitions": {\n')
    assert marker
    made = json.dumps({"config": build_schema()}, indent=2, ensure_ascii=False)
    return head + marker.replace("{\n", made.replace("\n", "\n  ")) + "\n}\n"


def derive_krew(text: str) -> str:
    """Krew's manifest with this version."""
    return re.sub(r"(?<=[ /]v)\d+\.\d+\.\d+", __version__, text)


def derive_references(text: str) -> str:
    """A document with this version in its image tags and its URLs for kustomize."""
    return re.sub(r"(\?ref=v|registry\.example/\w+:)\d+\.\d+\.\d+", rf"\g<1>{__version__}", text)


DERIVED: dict[Path, Callable[[str], str]] = {
    IMAGES: derive_images,
    CHART / "Chart.yaml": derive_chart,
    CHART / "values.schema.json": derive_schema,
    CHART / "README.md": derive_chart_readme,
    DEPLOY / "krew/evictions.yaml": derive_krew,
    ROOT / "README.md": derive_references,
    DEPLOY / "README.md": derive_references,
    ROOT / "docs/install.md": derive_references,
    ROOT / "docs/hold-evictions.md": derive_references,
}
"""Files with parts that are derived from this version or from other files."""


def main() -> None:
    """Write the derived files in order."""
    for path, derive in DERIVED.items():
        path.write_text(derive(path.read_text(encoding="utf-8")), encoding="utf-8")
    POLICY_COPY.write_bytes(POLICY.read_bytes())
    for copy, source in CHART_COPIES.items():
        copy.write_bytes(source.read_bytes())
    render.cache_clear()
    VALUES.write_text(derive_values(VALUES.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
