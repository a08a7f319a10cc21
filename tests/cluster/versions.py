"""The versions that the tests run: the pinned ones, or those that `make matrix` asks for."""

import os

import pytest


PINNED = {"kubevirt": "1.9.0", "kube-apiserver": "1.37.2", "descheduler": "0.36.0"}
"""The versions in the modules in `tests/tools` and `deploy/descheduler`; used by `make test`."""
RUNNING = {
    part: os.environ.get(part.replace("-", "_").upper()) or pinned
    for part, pinned in PINNED.items()
}
"""The version of each part, from the environment (such as KUBE_APISERVER) or else `PINNED`."""


def is_kubevirt_at_least(version: str) -> bool:
    """Whether the tested KubeVirt is of this version ("1.8") or newer."""
    return _order(RUNNING["kubevirt"]) >= _order(version)


def is_kubernetes_at_least(version: str) -> bool:
    """Whether the tested kube-apiserver is of this version ("1.37") or newer."""
    return _order(RUNNING["kube-apiserver"]) >= _order(version)


def since(version: str, what: str) -> pytest.MarkDecorator:
    """Skip a test with an older KubeVirt; `make matrix` prints what that version lacks."""
    there = is_kubevirt_at_least(version)
    return pytest.mark.skipif(not there, reason=f"KubeVirt {RUNNING['kubevirt']}: no {what}")


def _order(version: str) -> tuple[int, ...]:
    """The numbers of a version; a pre-release has the features of its release."""
    return tuple(map(int, version.partition("-")[0].split(".")))


OWN_SCHEDULER = pytest.mark.skipif(
    not is_kubernetes_at_least(PINNED["kube-apiserver"]),
    reason=f"kube-apiserver {RUNNING['kube-apiserver']}: no kube-scheduler that starts with it",
)
"""Skip a test with an older kube-apiserver than the kube-scheduler, which is not built for it."""
