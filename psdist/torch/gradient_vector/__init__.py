"""The flat vector of a model's gradients: its memory, and its division into buckets."""
