"""Tests of the simulated cluster: of its rules, its server and its scenario."""
