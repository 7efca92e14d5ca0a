"""Tokens, TLS identities, and the certificates of a deployment."""
