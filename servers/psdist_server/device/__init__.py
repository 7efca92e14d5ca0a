"""Parameters whose weights and optimizer state are on a CUDA device, with the same bytes as in host memory."""
