"""Gradients and weights in the memory of a CUDA device. Imported when a script gives or asks for device arrays."""
