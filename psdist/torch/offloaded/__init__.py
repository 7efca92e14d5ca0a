"""Parts of ``psdist.torch.offload``: layers whose weights are in memory only while they are used."""
