"""Commands about certificates and tokens."""
