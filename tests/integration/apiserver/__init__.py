"""The whole program with a real API server."""
