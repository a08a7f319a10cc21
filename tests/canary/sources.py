"""The sources of the newest KubeVirt, Kubernetes and descheduler, as Go modules.

Nothing is built, so a version can be checked even if its servers cannot be built.
"""

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.canary.fields import Schema
from tests.cluster.versions import PINNED


KUBEVIRT = "kubevirt.io/kubevirt"
KUBEVIRT_API = "kubevirt.io/api"
KUBERNETES = "k8s.io/kubernetes"
DESCHEDULER = "sigs.k8s.io/descheduler"
NEWEST = {
    KUBEVIRT: "v1.9.0",
    KUBEVIRT_API: "v1.9.0",
    KUBERNETES: f"v{PINNED['kube-apiserver']}",
    DESCHEDULER: f"v{PINNED['descheduler']}",
}
"""The newest versions that `make canary` has found so far; the tests check these."""

_VALIDATIONS = "pkg/virt-operator/resource/generate/components/validations_generated.go"


@dataclass(frozen=True, slots=True)
class Module:
    """The source of a Go module."""

    path: str
    version: str
    folder: Path

    def read(self, name: str) -> str:
        """The text of a file; "" if there is none."""
        file = self.folder / name
        return file.read_text(encoding="utf-8") if file.exists() else ""


class UnavailableError(Exception):
    """A module cannot be downloaded; the text is Go's error."""


def download(path: str, version: str) -> Module:
    """A module's source; the version may be "latest". Raises `UnavailableError`."""
    done = subprocess.run(
        ["go", "mod", "download", "-json", f"{path}@{version}"],
        capture_output=True,
        text=True,
        check=False,
    )
    answer = json.loads(done.stdout or "{}")
    if "Dir" not in answer:
        raise UnavailableError(answer.get("Error") or done.stderr.strip())
    return Module(path, answer["Version"], Path(answer["Dir"]))


def read_crd(kubevirt: Module, name: str) -> Schema:
    """The schema of one of KubeVirt's CRDs, by its singular name."""
    match = re.search(
        rf'^\t"{name}": `(.*?)`', kubevirt.read(_VALIDATIONS), re.DOTALL | re.MULTILINE
    )
    if match is None:
        return {}
    schema: Schema = yaml.load(match[1], yaml.CSafeLoader)["openAPIV3Schema"]
    return schema


def read_openapi(kubernetes: Module, group: str) -> dict[str, Any]:
    """The schemas of one of Kubernetes' API groups, by their full names."""
    document = kubernetes.read(f"api/openapi-spec/v3/{group}_openapi.json")
    schemas: dict[str, Any] = json.loads(document)["components"]["schemas"] if document else {}
    return schemas
