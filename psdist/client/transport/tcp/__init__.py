"""The tcp transport: a direct connection to each server, with payloads received where they are needed."""
