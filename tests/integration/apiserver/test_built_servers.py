"""Which built servers the tests use."""

import os
import subprocess
import sys


async def test_another_version_is_never_replaced_by_the_pinned_one() -> None:
    """If the requested version is not built, the error says how to build it."""
    done = subprocess.run(
        [sys.executable, "-c", "from tests.cluster import find_binary; find_binary('virt-api')"],
        env=os.environ | {"KUBEVIRT": "0.1.0"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert "run `tests/tools/build kubevirt@0.1.0`" in done.stderr
