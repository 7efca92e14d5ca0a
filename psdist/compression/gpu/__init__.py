"""Encoders of segments for gradients that lie on a CUDA device: the same payloads as on the host, byte for byte.

The kernels are CUDA C: ``segments.cu`` has what all share, ``dense.cu`` the codecs whose segments have a known size,
``sparse.cu`` the others. They take tables of segments, so that one launch encodes all segments of a codec. Nothing
here imports CuPy: a ``psdist.gpu.device.Device`` runs the kernels.
"""
