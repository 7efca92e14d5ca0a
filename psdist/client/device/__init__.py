"""Gradients and weights in the memory of a CUDA device. Imported when a script passes or requests device arrays."""
