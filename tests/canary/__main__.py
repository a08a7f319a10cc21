"""`make canary`: checks that the newest versions have what the exporter reads."""

import sys

from tests.canary.checks import CHECKS
from tests.canary.sources import NEWEST, Module, UnavailableError, download


def main() -> int:
    """Print one line per module, and one per difference; returns 1 if there is a difference."""
    differs = False
    for path, known in NEWEST.items():
        module, remark = _download_newest(path, known)
        faults = list(CHECKS[path](module))
        differs = differs or bool(faults)
        print(f"{path} {module.version}{remark}: {len(faults) or 'no'} differences")
        for fault in faults:
            print(f"  {fault}")
    return int(differs)


def _download_newest(path: str, known: str) -> tuple[Module, str]:
    try:
        return download(path, "latest"), ""
    except UnavailableError:
        return download(path, known), " (the latest version could not be looked up)"


if __name__ == "__main__":
    sys.exit(main())
