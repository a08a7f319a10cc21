"""The alerts: rules, runbooks, and a Prometheus to see them fire in."""
