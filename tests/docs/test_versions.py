"""docs/versions.md and tests/matrix/results.md have the results of `make matrix`."""

import json
import re

import pytest

from tests.cluster.versions import PINNED
from tests.matrix.document import fill, fill_results
from tests.matrix.pairs import PAIRS, read_results
from tests.support.documents import MATRIX_RESULTS, ROOT, VERSIONS, read, table


MODULES = {
    "kubevirt": ("tests/tools/kubevirt", "kubevirt.io/kubevirt"),
    "kube-apiserver": ("tests/tools/shared", "k8s.io/kubernetes"),
    "descheduler": ("deploy/descheduler", "sigs.k8s.io/descheduler"),
}


def test_the_tables_are_those_of_the_last_runs() -> None:
    """If the tables are filled from the results and recordings again, they do not change."""
    results = read_results()

    assert fill(read(VERSIONS), results) == read(VERSIONS)
    assert fill_results(read(MATRIX_RESULTS), results) == read(MATRIX_RESULTS)


def test_every_row_is_a_pair_that_is_run() -> None:
    """Each row of the table has the versions of a pair of `make matrix`, in the same order."""
    versions = [[pair.versions[part] for part in MODULES] for pair in PAIRS]
    shown = [row[:3] for row in table(VERSIONS, "Compatibility")]

    assert shown == [version for version in versions if version in shown]
    assert shown


@pytest.mark.parametrize("part", MODULES)
def test_the_pinned_versions_are_those_that_are_built(part: str) -> None:
    """The version that the tests pin is the version in go.mod."""
    folder, module = MODULES[part]
    required = (ROOT / folder / "go.mod").read_text(encoding="utf-8")

    assert re.search(rf"\s{re.escape(module)} v{re.escape(PINNED[part])}\s", required)


def test_the_documents_name_the_version_of_grafanas_libraries() -> None:
    """docs/versions.md and the page with the pictures name the version that draws them."""
    packages = json.loads(read(ROOT / "tests/tools/grafana-page/package.json"))["dependencies"]
    version = packages["@grafana/ui"]
    grafana = {
        name: packages[name] for name in packages if re.match(r"@grafana/(data|ui|schema)", name)
    }

    assert set(grafana.values()) == {version}
    assert f"| Grafana's libraries, without its server | {version} |" in read(VERSIONS)
    assert f"Grafana's libraries {version}" in read(ROOT / "docs/operate.md")
