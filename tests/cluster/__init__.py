"""Real servers for tests: etcd, kube-apiserver, KubeVirt's CRDs.

`tests.cluster.rig` adds KubeVirt's own controllers and simulated nodes.
"""

from .binaries import find_binary
from .client import ApiError, Client
from .cluster import EXPORTER_READS, RealCluster
from .objects import launcher_pod, namespace, vmi, vmim
from .polling import PATIENCE, poll
from .resources import KUBEVIRTS, NAMESPACES, PODS, VMIMS, VMIS, Resource
from .users import User


__all__ = [
    "EXPORTER_READS",
    "KUBEVIRTS",
    "NAMESPACES",
    "PATIENCE",
    "PODS",
    "VMIMS",
    "VMIS",
    "ApiError",
    "Client",
    "RealCluster",
    "Resource",
    "User",
    "find_binary",
    "launcher_pod",
    "namespace",
    "poll",
    "vmi",
    "vmim",
]
