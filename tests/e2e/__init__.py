"""A real cluster in its own namespaces, with pods of the built images."""
