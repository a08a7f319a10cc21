"""Whether the newest KubeVirt, Kubernetes and descheduler still have what the exporter reads."""
