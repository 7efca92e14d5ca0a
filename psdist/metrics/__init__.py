"""Training metrics as values: a script's reports, the division of its time, and sums over steps and workers. Pure.

- ``report`` checks a script's report of one step, and formats metrics for people.
- ``interval`` sums up steps, with the division of their time, combines workers, and encodes an interval for the
  launcher.
"""
