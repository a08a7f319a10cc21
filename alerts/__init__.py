"""The alerts: rules, and a demo in which they fire."""
