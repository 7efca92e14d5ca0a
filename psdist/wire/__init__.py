"""The wire: frames, conversions, errors, tokens, channels and limits. Everything that both sides must agree on."""
