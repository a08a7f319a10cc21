"""The admission webhook for evictions."""
