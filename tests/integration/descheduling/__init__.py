"""The real descheduler on KubeVirt's real controllers, with and without the exporter."""
