"""The manifests of `deploy/`: rendered, checked, and applied to a real API server."""
