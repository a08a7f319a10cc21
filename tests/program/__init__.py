"""The whole program, as a process or in the test's process, against the simulated API server."""
