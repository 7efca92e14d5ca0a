"""Commands about certificates."""
