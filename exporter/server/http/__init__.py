"""HTTP servers: listeners, connections, certificates, authentication and error responses."""
