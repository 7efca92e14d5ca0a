"""The data path: requests to servers, over gRPC or shared memory."""
