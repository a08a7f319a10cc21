"""The Kubernetes resources that tests write and the exporter reads."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object, and its path on the API server."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    has_status: bool = False
    """Whether status is a subresource, so that a plain create or update ignores it."""

    @property
    def api_version(self) -> str:
        """The `apiVersion` of its objects."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None) -> str:
        """The URL path of all objects, of the objects in a namespace, or of one object."""
        parts = ["/apis" if self.group else "/api", self.api_version]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        if name is not None:
            parts.append(name)
        return "/".join(parts)


VMIS = Resource("kubevirt.io", "v1", "virtualmachineinstances", "VirtualMachineInstance")
VMIMS = Resource(
    "kubevirt.io",
    "v1",
    "virtualmachineinstancemigrations",
    "VirtualMachineInstanceMigration",
    has_status=True,
)
KUBEVIRTS = Resource("kubevirt.io", "v1", "kubevirts", "KubeVirt", has_status=True)
PODS = Resource("", "v1", "pods", "Pod", has_status=True)
NODES = Resource("", "v1", "nodes", "Node", namespaced=False, has_status=True)
BUDGETS = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget", has_status=True)
EVENTS = Resource("", "v1", "events", "Event")
SERVICES = Resource("", "v1", "services", "Service")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
QUOTAS = Resource("", "v1", "resourcequotas", "ResourceQuota", has_status=True)
NAMESPACES = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
CRDS = Resource(
    "apiextensions.k8s.io",
    "v1",
    "customresourcedefinitions",
    "CustomResourceDefinition",
    namespaced=False,
)
CLUSTER_ROLES = Resource(
    "rbac.authorization.k8s.io", "v1", "clusterroles", "ClusterRole", namespaced=False
)
CLUSTER_ROLE_BINDINGS = Resource(
    "rbac.authorization.k8s.io", "v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False
)
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
MUTATING_WEBHOOKS = Resource(
    "admissionregistration.k8s.io",
    "v1",
    "mutatingwebhookconfigurations",
    "MutatingWebhookConfiguration",
    namespaced=False,
)
VALIDATING_WEBHOOKS = Resource(
    "admissionregistration.k8s.io",
    "v1",
    "validatingwebhookconfigurations",
    "ValidatingWebhookConfiguration",
    namespaced=False,
)
MUTATING_POLICIES = Resource(
    "admissionregistration.k8s.io",
    "v1",
    "mutatingadmissionpolicies",
    "MutatingAdmissionPolicy",
    namespaced=False,
)
MUTATING_POLICY_BINDINGS = Resource(
    "admissionregistration.k8s.io",
    "v1",
    "mutatingadmissionpolicybindings",
    "MutatingAdmissionPolicyBinding",
    namespaced=False,
)
API_SERVICES = Resource(
    "apiregistration.k8s.io", "v1", "apiservices", "APIService", namespaced=False
)
PRIORITY_CLASSES = Resource(
    "scheduling.k8s.io", "v1", "priorityclasses", "PriorityClass", namespaced=False
)
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
LEASES = Resource("coordination.k8s.io", "v1", "leases", "Lease")
EVICTION_REQUESTS = Resource(
    "lifecycle.k8s.io", "v1alpha1", "evictionrequests", "EvictionRequest", has_status=True
)
EVICTIONS = Resource("lifecycle.k8s.io", "v1alpha1", "evictions", "Eviction", has_status=True)
