"""The query API: its handlers, its answers and the OpenAPI document."""
