"""Where the built servers are."""

import os
import shutil
from pathlib import Path


_BUILT = Path(__file__).parents[2] / ".tools"


class MissingBinaryError(Exception):
    """A server or tool that `make tools` builds is not there."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not built: run `make tools` (or `tests/tools/build {name}`)")


def find_binary(name: str) -> Path:
    """Find a server or tool in the order in which `tests/tools/build` looks for it."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    folders = [assets] if assets else []
    path = os.pathsep.join([*folders, str(_BUILT / "bin"), os.environ.get("PATH", os.defpath)])
    found = shutil.which(name, path=path)
    if found is None:
        raise MissingBinaryError(name)
    return Path(found)


def find_crds() -> Path:
    """Find the file of KubeVirt's CRDs."""
    return _find_printed("crds")


def find_added_crds() -> Path:
    """Find the file of the CRDs of others: the Prometheus operator's and cert-manager's."""
    return _find_printed("added-crds")


def find_manifests() -> Path:
    """Find the file of what KubeVirt's operator installs around its servers."""
    return _find_printed("manifests")


def _find_printed(name: str) -> Path:
    path = _BUILT / f"{name}.json"
    if not path.exists():
        raise MissingBinaryError(name)
    return path
