"""Where the built servers are."""

import os
import shutil
from pathlib import Path

from .versions import PINNED, RUNNING


_BUILT = Path(__file__).parents[2] / ".tools"
_PARTS = {
    "virt-api": "kubevirt",
    "virt-controller": "kubevirt",
    "crds": "kubevirt",
    "manifests": "kubevirt",
    "virt-exportproxy": "kubevirt",
    "virt-launcher": "kubevirt",
    "virt-operator": "kubevirt",
    "operator": "kubevirt",
    "kube-apiserver": "kube-apiserver",
    "kube-controller-manager": "kube-apiserver",
    "descheduler": "descheduler",
}
"""For each server or generated file, the part whose version it has."""


class MissingBinaryError(Exception):
    """A server or tool that `make tools` builds is missing."""

    def __init__(self, name: str) -> None:
        part = _PARTS.get(name)
        how = f"run `make tools` (or `tests/tools/build {name}`)"
        if part and RUNNING[part] != PINNED[part]:
            how = f"run `tests/tools/build {part}@{RUNNING[part]}`"
        super().__init__(f"{name} is not built: {how}")


def find_binary(name: str) -> Path:
    """Find a server or tool in the order in which `tests/tools/build` looks for it."""
    folder = _folder(name)
    if folder != _BUILT:
        path = str(folder / "bin")
    else:
        assets = os.environ.get("KUBEBUILDER_ASSETS")
        folders = [assets] if assets else []
        path = os.pathsep.join([*folders, str(folder / "bin"), os.environ.get("PATH", os.defpath)])
    place = shutil.which(name, path=path)
    if place is None:
        raise MissingBinaryError(name)
    return Path(place)


def find_crds() -> Path:
    """Find the file of KubeVirt's CRDs."""
    return _find_printed("crds")


def find_added_crds() -> Path:
    """Find the file of other projects' CRDs: the Prometheus operator's and cert-manager's."""
    return _find_printed("added-crds")


def find_perses_plugins() -> Path:
    """Find the JSON file that has the schemas of Perses's plugins by their path."""
    return _find_printed("perses-plugins")


def find_manifests() -> Path:
    """Find the file of the objects that KubeVirt's operator installs."""
    return _find_printed("manifests")


def find_operator() -> Path:
    """Find the file of the objects with which a KubeVirt release installs virt-operator."""
    return _find_printed("operator")


def _find_printed(name: str) -> Path:
    path = _folder(name) / f"{name}.json"
    if not path.exists():
        raise MissingBinaryError(name)
    return path


def _folder(name: str) -> Path:
    """The folder of a server, either in the pinned version or in the tested version."""
    part = _PARTS.get(name)
    if part is None or RUNNING[part] == PINNED[part]:
        return _BUILT
    return _BUILT / RUNNING[part]
