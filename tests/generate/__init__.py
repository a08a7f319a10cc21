"""Writes the generated files of the project."""

REPOSITORY = "https://github.com/kubevirt-eviction-exporter/exporter"
"""Where the project is published. Change it only here."""
