"""psdist: training through sharded parameter servers."""
