"""The Kubernetes API: client, reflectors, KubeVirt's objects, the Lease."""
