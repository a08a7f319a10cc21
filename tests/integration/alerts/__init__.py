"""Tests of the alerts and the runbooks."""
