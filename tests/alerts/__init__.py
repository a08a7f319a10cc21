"""The alerts as they are shipped, what is derived from them, and how they are tested."""
