"""A cluster with a pod, for the test that kills it: `python -m tests.e2e.trial DIRECTORY`.

It prints a line when the pod runs, and ends when its standard input ends.
"""

import sys
from pathlib import Path

from tests.e2e.cluster import Cluster
from tests.e2e.images import IMAGES
from tests.e2e.node import inside_network, prepare, running


def main() -> None:
    """Run the cluster."""
    directory = Path(sys.argv[1])
    config = prepare(directory, IMAGES)
    with running("n1", directory) as node, inside_network(node):
        cluster = Cluster(directory, node, config)
        cluster.wait_until_ready()
        cluster.run_pause("default", "trial")
        cluster.kubectl("rollout", "status", "deployment/trial", "--timeout=120s")
        print("running", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
