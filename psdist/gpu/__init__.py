"""A CUDA device: opening one, compiling kernels for it, and what kernels of both sides have in common.

Nothing here imports CuPy or loads a library of CUDA before a device is opened or a source is compiled.
"""
