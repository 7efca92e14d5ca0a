"""Random and mutated inputs for decoders, in batches that run as compiled code."""
