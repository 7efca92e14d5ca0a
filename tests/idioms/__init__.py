"""Idioms of PyTorch training scripts, each written as scripts write it, and the page of their outcomes."""
