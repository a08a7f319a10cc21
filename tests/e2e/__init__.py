"""A real cluster in namespaces of its own: the images are built, and their pods run."""
