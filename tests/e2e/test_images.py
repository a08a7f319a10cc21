"""The content of the images: labels, user, files and sizes."""

import json
import re
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exporter import __version__
from tests.e2e.images import DESCHEDULER, EXPORTER, Image
from tests.integration.deploy.test_sbom import pins


INSTALLERS = re.compile(r"bin/(apt|apt-get|bash|dash|dpkg|pip3?|sh)$|/(ensurepip|pip)/")
SOURCE = "https://github.com/kubevirt-eviction-exporter/exporter"


def unpack(image: Image) -> tuple[dict[str, Any], Counter[str]]:
    """The configuration of an image, and the bytes of each of its files."""
    sizes: Counter[str] = Counter()
    with tarfile.open(image.archive) as archive:

        def member(name: str) -> Any:
            content = archive.extractfile(name)
            assert content is not None
            return content

        (manifest,) = json.load(member("manifest.json"))
        config = json.load(member(manifest["Config"]))["config"]
        for layer in manifest["Layers"]:
            with tarfile.open(fileobj=member(layer)) as files:
                sizes.update({file.name.removeprefix("./"): file.size for file in files})
    return config, sizes


def top(sizes: Counter[str]) -> str:
    """The largest folders, with their sizes."""
    folders: Counter[str] = Counter()
    for path, size in sizes.items():
        folders["/".join(Path(path).parts[:2])] += size
    return ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in folders.most_common(12))


@pytest.mark.parametrize("image", [EXPORTER, DESCHEDULER], ids=["exporter", "descheduler"])
def test_an_image(image: Image, prove: Callable[[str], None]) -> None:
    """An image has its source as a label, does not run as root, and has no shell or installer.

    Its Python packages are pinned, so that the bill of materials lists them.
    """
    config, sizes = unpack(image)

    assert not [path for path in sizes if re.match(r"app/exporter/(demo|whatif)/", path)]
    labels = {key.rpartition(".")[2]: value for key, value in config["Labels"].items()}
    assert labels["source"] == SOURCE
    assert labels["version"] == __version__
    assert labels["revision"] == image.revision
    assert config["User"] == "65532:65532"
    assert [path for path in sizes if INSTALLERS.search(path)] == []
    packages = {
        (match[1].replace("_", "-").lower(), match[2])
        for path in sizes
        if (match := re.search(r"^app/([^/]*)-([^-/]*)\.dist-info/METADATA$", path))
    }
    assert packages <= pins().keys()
    assert (image is EXPORTER) == ({"aiohttp", "msgspec", "structlog"} <= dict(packages).keys())
    listed = " ".join(f"{name}-{version}" for name, version in sorted(packages))
    prove(f"{image.name}: {sum(sizes.values()) / 1e6:.0f} MB: {top(sizes)}; {listed}")
