"""The launcher's side of metrics: the pipe that workers report by, and what becomes of their reports."""
