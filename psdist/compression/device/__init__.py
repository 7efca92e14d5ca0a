"""Encoders of segments for gradients in the memory of a CUDA device: the host's payloads, byte for byte.

The kernels are CUDA C: ``segments.cu`` is shared by all, ``dense.cu`` holds the codecs whose segments have a known
size, ``sparse.cu`` the others. They take tables of segments, so that one launch encodes all segments of a codec. CuPy
is not imported here: a ``psdist.device.device.Device`` runs the kernels.
"""
