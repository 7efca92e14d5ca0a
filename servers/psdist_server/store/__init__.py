"""The parameters of one server: routing of calls, updates, replicas, and copies for snapshots."""
