"""Reads and writes KubeVirt's objects: the only code that knows their field paths."""
