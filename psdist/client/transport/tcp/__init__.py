"""TCP transport: a connection to each server, with payloads received in place."""
