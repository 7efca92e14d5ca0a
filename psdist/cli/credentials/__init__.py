"""Commands that make and show credentials: tokens of roles."""
