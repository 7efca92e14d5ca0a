"""Parameters whose weights and optimizer state lie on a CUDA device, with the bytes of those in the host's memory."""
