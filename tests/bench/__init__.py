"""The benchmark: what the exporter costs beside what it is measured against (`make bench`)."""
