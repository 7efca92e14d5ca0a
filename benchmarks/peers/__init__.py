"""What psdist is compared with: each module is the worker process of one peer (see ``benchmarks.turns``)."""
