"""The benchmark: what the exporter costs beside the alternatives (`make bench`)."""
