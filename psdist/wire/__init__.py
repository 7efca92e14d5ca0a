"""Shared by both ends of a connection: frames, message conversion, errors, tokens, channels and limits."""
