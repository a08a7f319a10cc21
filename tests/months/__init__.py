"""Months of a simulated cluster, in which the alerts are evaluated by Prometheus's own rule groups.

`python -m tests.months` runs the scenarios and prints what fired and how soon.
"""
