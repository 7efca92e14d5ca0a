"""The gRPC transport: every payload in a message of its own."""
