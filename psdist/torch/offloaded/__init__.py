"""The parts of ``psdist.torch.offload``: layers whose weights come and go."""
