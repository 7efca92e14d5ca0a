"""Training metrics as values: a script's reports, the division of its time, and sums over steps and workers. Pure.

- ``report`` checks a script's report of one step.
- ``phases`` divides a script's time.
- ``interval`` sums up steps and combines workers.
- ``interval_lines`` encodes an interval for the launcher; ``progress_line`` formats it for people.
"""
