"""What the exporter and the plugin rely on, looked up in the sources of each project."""

from collections.abc import Callable, Iterator, Mapping

from msgspec import Struct

from exporter.engine.facts.model import Priority
from exporter.engine.facts.states import VMIM_CONDITIONS
from exporter.kube import lease
from exporter.kube.objects import facts, wire
from tests.canary.fields import find_faults, read_paths
from tests.canary.sources import (
    DESCHEDULER,
    KUBERNETES,
    KUBEVIRT,
    KUBEVIRT_API,
    Module,
    read_crd,
    read_openapi,
)


_CRDS = {
    "virtualmachineinstance": wire.VmiObject,
    "virtualmachineinstancemigration": wire.VmimObject,
    "kubevirt": wire.KubeVirtObject,
}
_CORE = "api__v1"
_COORDINATION = "apis__coordination.k8s.io__v1"
_KINDS: Mapping[str, Mapping[str, type[Struct]]] = {
    _CORE: {"io.k8s.api.core.v1.Pod": wire.PodObject},
    _COORDINATION: {"io.k8s.api.coordination.v1.Lease": lease._Lease},  # noqa: SLF001
}
_DECLARED_NAMES = {
    "core/v1/types.go": (
        facts.EVACUATION,
        facts.WORKLOAD_UPDATE,
        facts.EVICTION_SOURCE,
        facts.CREATED_BY,
        facts.MIGRATION_UID,
        *VMIM_CONDITIONS,
        *Priority,
        *facts._HANDED_OFF_PHASES,  # noqa: SLF001
        *facts._OUTCOMES,  # noqa: SLF001
        *("EvictionRequested", "LiveMigratable", "migrationAbortRequested", "PostCopy"),
        *("External", "LiveMigrate", "LiveMigrateIfPossible"),
    )
}
"""Annotations, labels, conditions and values that KubeVirt's API declares, by file."""
_OTHER_NAMES = {
    "pkg/virt-controller/watch/descheduler/descheduler.go": (facts.EVICTION_IN_PROGRESS,),
    "pkg/virt-api/webhooks/validating-webhook/admitters/pod-eviction-admitter.go": (
        *("descheduler", "virt-launcher"),
    ),
}
"""Names that only the code of virt-controller and virt-api has."""
_DECLARED = {
    "pkg/framework/types/types.go": (
        "type Plugin interface {\n\tName() string\n}",
        (
            "type EvictorPlugin interface {\n\tPlugin\n\tFilter(pod *v1.Pod) bool\n"
            "\tPreEvictionFilter(pod *v1.Pod) bool\n}"
        ),
    ),
    "pkg/framework/pluginregistry/pluginregistry.go": (
        (
            "type PluginBuilder = func(ctx context.Context, args runtime.Object, "
            "handle frameworktypes.Handle) (frameworktypes.Plugin, error)"
        ),
        "PluginArgValidator = func(args runtime.Object) error",
        "PluginArgDefaulter = func(args runtime.Object)",
        (
            "func Register(\n\tname string,\n\tbuilderFunc PluginBuilder,\n"
            "\tpluginType interface{},\n\texampleArg runtime.Object,\n"
            "\tpluginArgValidator PluginArgValidator,\n\tpluginArgDefaulter PluginArgDefaulter,\n"
            "\tregistry Registry,\n)"
        ),
    ),
}
"""What the plugin implements and calls, as the descheduler declares it."""


def check_crds(kubevirt: Module) -> Iterator[str]:
    """The fields of KubeVirt's objects, without metadata, which Kubernetes defines."""
    for name, decoded in _CRDS.items():
        paths = read_paths(decoded).items()
        own = {path: kind for path, kind in paths if not path.startswith("metadata.")}
        yield from _named(name, find_faults(own, read_crd(kubevirt, name), {}))
    yield from _find_absent(kubevirt, _OTHER_NAMES, quoted=True)


def check_names(api: Module) -> Iterator[str]:
    """Annotations, labels, conditions and phases that KubeVirt's API declares."""
    yield from _find_absent(api, _DECLARED_NAMES, quoted=True)


def check_kubernetes(kubernetes: Module) -> Iterator[str]:
    """The fields of pods, ConfigMaps and Leases, metadata included."""
    for group, kinds in _KINDS.items():
        schemas = read_openapi(kubernetes, group)
        for name, decoded in kinds.items():
            faults = find_faults(read_paths(decoded), schemas.get(name, {}), schemas)
            yield from _named(name.rpartition(".")[2], faults)


def check_plugin(descheduler: Module) -> Iterator[str]:
    """The declarations on which the plugin relies."""
    yield from _find_absent(descheduler, _DECLARED, quoted=False)


def _find_absent(
    module: Module, expected: Mapping[str, tuple[str, ...]], *, quoted: bool
) -> Iterator[str]:
    for file, texts in expected.items():
        source = module.read(file)
        for text in texts:
            if (f'"{text}"' if quoted else text) not in source:
                yield f"{file}: {text.split(' {')[0]!r} is gone"


def _named(name: str, faults: list[str]) -> Iterator[str]:
    for fault in faults:
        yield f"{name}: {fault}"


CHECKS: Mapping[str, Callable[[Module], Iterator[str]]] = {
    KUBEVIRT: check_crds,
    KUBEVIRT_API: check_names,
    KUBERNETES: check_kubernetes,
    DESCHEDULER: check_plugin,
}
