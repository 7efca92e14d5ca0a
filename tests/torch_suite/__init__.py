"""PyTorch's own tests of a torch.distributed backend, run with the backend ``psdist`` and with gloo.

The tests are those of ``_DistTestBase`` in PyTorch's wheel. A test that passes with gloo must pass with psdist.
"""
