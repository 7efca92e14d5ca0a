"""Mean gradients of ``DistributedDataParallel`` over the links between workers, without the servers."""
