"""Runs that a Python program starts by ``psdist.launch``, such as a notebook or a test."""
