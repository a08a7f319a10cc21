"""Says which KubeVirt VMs must not be moved now, and which evacuations are stuck."""

__version__ = "0.1.0"
