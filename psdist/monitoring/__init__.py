"""Metrics for Prometheus: their catalog, and the HTTP port on which a process shows them."""
