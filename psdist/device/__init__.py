"""CUDA devices: open one, compile kernels for it, and the CUDA source that clients and servers share.

CuPy and CUDA libraries are loaded only when a device is opened or a source is compiled.
"""
