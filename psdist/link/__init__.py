"""Links: connections between two peers beside the gRPC stream that authenticates them."""
