"""The data path: requests to servers, over shared memory, TCP or gRPC."""
