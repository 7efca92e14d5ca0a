"""Security of a run: roles and their rights, tokens, TLS identities, and the certificates of a deployment."""
