"""A real cluster in its own Linux namespaces, with pods of the built images."""
