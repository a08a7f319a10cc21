"""The newest versions have every field and name that is read; missing ones are reported."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest

from exporter.kube.objects import wire
from tests.canary.checks import CHECKS
from tests.canary.fields import find_faults, read_paths
from tests.canary.sources import (
    DESCHEDULER,
    KUBEVIRT,
    KUBEVIRT_API,
    NEWEST,
    Module,
    download,
    read_crd,
)


@pytest.mark.parametrize("path", NEWEST)
def test_the_newest_version_has_all_that_is_read(path: str) -> None:
    """No field path, name or declaration that we rely on is gone or of another type."""
    assert list(CHECKS[path](download(path, NEWEST[path]))) == []


def test_a_field_that_is_gone_or_has_changed_is_named() -> None:
    """Each missing or changed field is reported with its path, also fields below a missing one."""
    schema: Any = copy.deepcopy(read_crd(download(KUBEVIRT, NEWEST[KUBEVIRT]), VMI))
    status = schema["properties"]["status"]["properties"]
    del status["evacuationNodeName"]
    del status["migrationState"]["properties"]["sourceState"]
    status["phase"]["type"] = "object"

    assert find_faults(read_paths(wire.VmiObject), schema, {}) == [
        *METADATA_IS_ELSEWHERE,
        "status.phase is of type object, expected string",
        "status.evacuationNodeName is gone",
        "status.migrationState.sourceState is gone",
        "status.migrationState.sourceState.migrationUID is gone",
    ]


@pytest.mark.parametrize(
    ("path", "file", "text"),
    [
        (KUBEVIRT_API, "core/v1/types.go", "kubevirt.io/evacuationMigration"),
        (DESCHEDULER, "pkg/framework/types/types.go", "PreEvictionFilter(pod *v1.Pod) bool"),
    ],
    ids=["annotation", "interface"],
)
def test_a_name_that_is_gone_is_named(path: str, file: str, text: str, tmp_path: Path) -> None:
    """A missing name or declaration is reported.

    If a whole file is missing, everything that we read in it is reported.
    """
    newest = download(path, NEWEST[path])
    shutil.copytree(newest.folder / Path(file).parts[0], tmp_path / Path(file).parts[0])
    changed = tmp_path / file
    changed.chmod(0o644)
    changed.write_text(changed.read_text(encoding="utf-8").replace(text, ""), encoding="utf-8")
    module = Module(path, "v0", tmp_path)
    (fault,) = CHECKS[path](module)

    assert fault.startswith(f"{file}: ")
    changed.parent.chmod(0o755)
    changed.unlink()
    assert len(list(CHECKS[path](module))) > 1


VMI = "virtualmachineinstance"
METADATA_IS_ELSEWHERE = [
    f"{path} is gone" for path in read_paths(wire.VmiObject) if path.startswith("metadata.")
]
"""A CRD does not describe metadata, which is checked in Kubernetes' own schemas."""


def test_every_decoded_field_is_looked_up() -> None:
    """The paths include nested fields, also in lists and in fields that are decoded later."""
    vmi, pod = read_paths(wire.VmiObject), read_paths(wire.PodObject)

    assert vmi["status.migrationState.endTimestamp"] == "string"
    assert vmi["status.migrationState.completed"] == "boolean"
    assert vmi["status.conditions[].lastTransitionTime"] == "string"
    assert pod["status.containerStatuses[].state.terminated.exitCode"] == "integer"
    assert pod["metadata.ownerReferences[].uid"] == "string"
