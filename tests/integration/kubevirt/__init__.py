"""The whole program with KubeVirt's own controllers on a real API server."""
