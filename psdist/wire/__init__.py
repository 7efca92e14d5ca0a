"""The wire: frames, conversions, errors, tokens, channels and limits. Both sides must agree on all of it."""
