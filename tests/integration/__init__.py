"""Tests with real servers: `make test-integration`."""
