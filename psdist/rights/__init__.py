"""Rights of the callers within a run: roles, the calls that each may make, and tokens that prove a role. Pure."""
