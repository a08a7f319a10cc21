"""The engine's values: what was read from a cluster, the policy, and what changes them."""
