"""gRPC transport: one message per payload."""
