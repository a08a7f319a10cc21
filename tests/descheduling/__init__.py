"""The real descheduler on KubeVirt's real controllers, with the exporter beside it and without."""
