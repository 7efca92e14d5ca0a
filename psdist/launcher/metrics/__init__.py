"""The launcher's side of metrics: the pipe on which workers report, and the trackers that receive the reports."""
