"""The benchmark: what the exporter costs, compared with alternatives (`make bench`)."""
