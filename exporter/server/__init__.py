"""HTTP: the query API, its listeners, and who may call it."""
