"""PyTorch's own tests of torch.distributed, run with the backend ``psdist`` and with gloo.

They are ``_DistTestBase`` in PyTorch's wheel, and files of its source. A test that passes with gloo must pass with
psdist.
"""
