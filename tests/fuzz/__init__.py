"""Random and mutated inputs for decoders, in batches that run without the interpreter."""
