"""Base of transports that are negotiated with each server over gRPC: connections, and calls on them."""
