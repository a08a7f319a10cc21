"""The names under which an API server serves KubeVirt, which some platforms change.

Deckhouse's group is `internal.virtualization.deckhouse.io`, and its VMIs are
`internalvirtualizationvirtualmachineinstances`, of the kind
`InternalVirtualizationVirtualMachineInstance`. Its labels begin with
`kubevirt.internal.virtualization.deckhouse.io`.
"""

import re

from msgspec import Struct

from exporter.engine.facts.model import Resource


KUBEVIRT_GROUP = "kubevirt.io"
"""KubeVirt's own API group, with which also its labels and annotations begin."""
_RESOURCE = re.compile(r"(?<![\w.])(?=virtualmachineinstance|kubevirts)")
_KIND = re.compile(r"(?<!\w)(?=VirtualMachineInstance)")
_LABEL = re.compile(r"(?<![\w.])kubevirt\.io(?![\w.])")


class KubeVirtNames(Struct, frozen=True, kw_only=True):
    """The API group, the prefix of the kinds and resources, and the domain of the labels.

    Resources are in lower case, whatever the prefix is.
    """

    api_group: str = KUBEVIRT_GROUP
    resource_prefix: str = ""
    label_domain: str = KUBEVIRT_GROUP

    def write_resource(self, resource: Resource) -> str:
        """The plural name of one of KubeVirt's resources, as in the API's paths."""
        return f"{self.resource_prefix.lower()}{resource}"

    def translate(self, text: str) -> str:
        """A text, such as a command, with the cluster's names instead of KubeVirt's own."""
        text = _RESOURCE.sub(self.resource_prefix.lower(), text)
        text = _KIND.sub(self.resource_prefix, text)
        return _LABEL.sub(self.label_domain, text)

    def restore(self, texts: list[bytes]) -> list[bytes]:
        """JSON of the API server, with KubeVirt's own domain in the labels and annotations."""
        if self.label_domain == KUBEVIRT_GROUP:
            return texts
        renamed, own = self.label_domain.encode(), KUBEVIRT_GROUP.encode()
        return [text.replace(renamed, own) for text in texts]


KUBEVIRT = KubeVirtNames()
"""KubeVirt's own names."""
