"""Links: connections between two peers, beside the gRPC stream that authenticates them.

A worker dials servers, and a primary its replicas. Both carry messages in frames over a Unix socket or TCP.
"""
