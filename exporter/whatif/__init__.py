"""Recordings of a cluster, and what another policy would have done with them."""
