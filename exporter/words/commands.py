"""What a person can do about a VM that does not move, and the commands that begin it."""

from shlex import quote

import msgspec
from msgspec import Struct

from exporter.engine.facts.evidence import Evidence


STUCK_RUNBOOK = "KubeVirtEvacuationStuck"
FAILING_RUNBOOK = "KubeVirtEvacuationFailingRepeatedly"
FIND_KUBEVIRT = "$(kubectl get kubevirts -A -o jsonpath='{.items[0].metadata.namespace}')"
"""KubeVirt's own namespace in a command, if the exporter does not know it."""


class Action(Struct, frozen=True):
    """A sentence that says what to do, a shell command, and the runbook that has this step.

    Templates: `{namespace}` and `{name}` of the VM, `{attempt}` (its unfinished VMIM), `{vmim}`
    (the same, or the VMIM that failed last), `{uid}` (the unfinished VMIM's UID), `{cancel}` (the
    command that cancels), `{node}` (the node that the VM is to leave), `{kubevirt}` (KubeVirt's own
    namespace), `{on_source}` and `{on_target}` (selectors of the pods on those nodes), `{pod}` (the
    launcher pod that the VM has left) and `{taint}` (the key of KubeVirt's drain taint). In the
    sentence also `{launcher}` (the pod that runs the VM), `{vm_node}` (its node), `{missing}` (the
    resources that are not seen), `{target}` (the target pod's node), `{limit}` (the limit of
    migrations that is reached, and who uses it), `{setting}` (its name), `{copied}` (what a
    migration copies), `{gate}` (the scheduling gate), `{handlers}` (the nodes without virt-handler)
    `{refusals}` (why other nodes cannot take the VM) and `{withdrawn}` (who does not ask for its
    eviction any more).
    """

    sentence: str
    command: str
    runbook: str = STUCK_RUNBOOK


VMI = "kubectl -n {namespace} get virtualmachineinstance {name}"
ATTEMPTS = (
    "kubectl -n {namespace} get virtualmachineinstancemigrations -l kubevirt.io/vmi-name={name}"
)
CONDITIONS = (
    """ -o jsonpath='{{range .status.conditions[?(@.status=="False")]}}"""
    """{{.type}} {{.reason}}: {{.message}}{{"\\n"}}{{end}}'"""
)
EVENTS = "kubectl -n {namespace} get events | sed -n -e /{vmim}/p -e /virt-launcher-{name}/p"
VMIM_EVENTS = (
    "kubectl -n {namespace} get events"
    " --field-selector involvedObject.kind=VirtualMachineInstanceMigration"
)
CONTROLLER_LOG = (
    "kubectl -n {kubevirt} logs -l kubevirt.io=virt-controller --tail=-1 --prefix"
    " | sed -n /{name}/p"
)
HANDLERS = "kubectl -n {kubevirt} get pods -l kubevirt.io=virt-handler -o wide"
RESTART = "virtctl -n {namespace} restart {name}"
DESCRIBE_PODS = "kubectl -n {namespace} describe pods -l vmi.kubevirt.io/id={name}"
MIGRATION_SETTINGS = (
    "kubectl get kubevirts -A"
    """ -o jsonpath='{{.items[*].spec.configuration.migrations}}{{"\\n"}}'"""
)
LAUNCHER_LOG = (
    "kubectl -n {namespace} logs -l vmi.kubevirt.io/id={name} -c compute --tail=200 --prefix"
)
PODS = "kubectl -n {namespace} get pods -l vmi.kubevirt.io/id={name} -o wide"


def write_cancel(namespace: str, name: str, node: str) -> str:
    """The shell command that cancels an evacuation from a node."""
    body = msgspec.json.encode({"evacuationNodeName": node}).decode()
    path = write_cancel_path(namespace, name)
    return f"echo {quote(body)} | kubectl replace --raw {quote(path)} -f -"


def describe_cancel(evidence: Evidence) -> str:
    """What has to be done before an evacuation can be cancelled, and what that needs.

    The API server checks the first permission, and virt-api the second. KubeVirt's own roles have
    only the second.
    """
    eviction = evidence.eviction
    askers = () if eviction is None else eviction.askers
    first = (
        f"First withdraw the EvictionRequest of {' and '.join(askers)}, or Kubernetes asks KubeVirt"
        " again. "
        if askers
        else ""
    )
    return (
        f"{first}Cancelling needs KubeVirt 1.7, and a role that may update"
        " virtualmachineinstances/evacuate and virtualmachineinstances/evacuate/cancel of"
        " subresources.kubevirt.io. Never cancel in post-copy, because that kills the VM."
    )


def write_cancel_path(namespace: str, name: str) -> str:
    """The path of KubeVirt's API that cancels the evacuation of a VMI."""
    return (
        f"/apis/subresources.kubevirt.io/v1/namespaces/{namespace}"
        f"/virtualmachineinstances/{name}/evacuate/cancel"
    )
