"""The files of `deploy/`, rendered, and what is derived from others.

`python -m tests.deploy.files` (`make manifests`) writes what is derived: the release's images, the
copy of the descheduler's policy, and what the chart's values share with both.
"""

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from exporter import __version__
from tests.cluster.binaries import find_binary


Object: TypeAlias = dict[str, Any]

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
REGISTRY = "quay.io/kubevirt-eviction-exporter"
"""Where the images are published: the one place to change it."""
EXPORTER_IMAGE = f"{REGISTRY}/exporter:{__version__}"
DESCHEDULER_IMAGE = f"{REGISTRY}/descheduler:{__version__}"
NAME = NAMESPACE = "kubevirt-eviction-exporter"

OVERLAYS = (
    "base",
    "overlays/sidecar",
    "overlays/standalone",
    "overlays/admission",
    "overlays/openshift",
)
"""Each is a whole installation."""
ADDITIONS = ("overlays/monitoring", "helm", "components/cert-manager", "components/events")
"""Each goes with something else."""

TLS_SECRET = f"{NAME}-tls"
"""The certificate: made beside the manifests, by the one or the other."""

IMAGES = DEPLOY / "components/images/kustomization.yaml"
POLICY = DEPLOY / "descheduler/policy.yaml"
POLICY_COPY = DEPLOY / "components/descheduler/policy.yaml"
VALUES = DEPLOY / "helm/values.yaml"
_CHART = "sigs.k8s.io/descheduler"
_IN_BOTH = (
    "# Derived from ../overlays/sidecar and ../descheduler/policy.yaml by `make manifests`.\n"
)


class _Dumper(yaml.SafeDumper):
    """Indents lists as the rest of our YAML does."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: FBT002
        del indentless
        super().increase_indent(flow, indentless=False)


@cache
def render(folder: str) -> tuple[Object, ...]:
    """The objects that kustomize makes of a folder of `deploy/`."""
    command = [str(find_binary("kustomize")), "build", str(DEPLOY / folder)]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    assert not made.stderr, made.stderr
    return tuple(yaml.safe_load_all(made.stdout))


@cache
def render_chart() -> tuple[Object, ...]:
    """The objects that the descheduler's own chart makes of our values."""
    command = [str(find_binary("helm")), "template", "descheduler", str(chart())]
    command += ["--namespace", NAMESPACE, "--values", str(VALUES)]
    made = subprocess.run(command, check=True, capture_output=True, text=True)
    return tuple(filter(None, yaml.safe_load_all(made.stdout)))


def chart() -> Path:
    """The chart of the descheduler that our binary is built from: its module holds it."""
    command = ["go", "mod", "download", _CHART]
    subprocess.run(command, check=True, cwd=DEPLOY / "descheduler")
    command = ["go", "list", "-m", "-f", "{{.Dir}}", _CHART]
    found = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=DEPLOY / "descheduler"
    )
    return Path(found.stdout.strip()) / "charts/descheduler"


def only(objects: tuple[Object, ...], kind: str, name: str = NAME) -> Object:
    """The one object of that kind and name, the hash of a generated name left out."""
    fitting = [
        one
        for one in objects
        if one["kind"] == kind
        and re.fullmatch(re.escape(name) + "(-[a-z0-9]{10})?", one["metadata"]["name"])
    ]
    assert len(fitting) == 1, f"{len(fitting)} of {kind} {name}"
    return fitting[0]


def pod_templates(objects: tuple[Object, ...]) -> list[Object]:
    """The pods that the objects would make."""
    return [one["spec"]["template"] for one in objects if "template" in one.get("spec", {})]


def containers(template: Object) -> dict[str, Object]:
    """All containers of a pod by name."""
    spec = template["spec"]
    return {one["name"]: one for one in spec.get("initContainers", []) + spec["containers"]}


def config_of(objects: tuple[Object, ...]) -> Object:
    """The exporter's configuration that is in them."""
    text = only(objects, "ConfigMap", f"{NAME}-config")["data"]["config.yaml"]
    document: Object = yaml.safe_load(text)
    return document


def derive_images(text: str) -> str:
    """The images with this version's tag."""
    return re.sub(r"(?<=newTag: ).*", __version__, text)


def derive_values(text: str) -> str:
    """The chart's values: what is written by hand, with this version, then what is shared."""
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
    """The version of a policy file, and what is below its head, indented and without comments."""
    head, kind, body = text.partition("kind: DeschedulerPolicy\n")
    version = re.search(r"^apiVersion: (\S+)$", head, re.MULTILINE)
    assert kind
    assert version
    bare = re.sub(r"^ *#.*\n", "", body, flags=re.MULTILINE)
    return version[1].strip('"'), re.sub(r"^(?=.)", "  ", bare, flags=re.MULTILINE)


def main() -> None:
    """Write what is derived, each from what was written before."""
    IMAGES.write_text(derive_images(IMAGES.read_text(encoding="utf-8")), encoding="utf-8")
    POLICY_COPY.write_bytes(POLICY.read_bytes())
    render.cache_clear()
    VALUES.write_text(derive_values(VALUES.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
