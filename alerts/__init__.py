"""The alerts: rules, runbooks, and a demo in which they fire."""
