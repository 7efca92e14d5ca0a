"""Activity of a run's members: the newest samples, and the summary of the whole run."""
