"""Small exchanges beside a model's gradients: numbers of ranks, and losses."""
