"""Tests of the simulated cluster: its rules, its server and its scenarios."""
