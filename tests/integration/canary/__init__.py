"""The canary finds what newer versions lack; it needs Go."""
