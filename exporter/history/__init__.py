"""Persists the migration history across restarts, in a file or in ConfigMaps."""
