"""Training metrics as values: what a script reports, what a step's time went into, and their sums over steps and
workers. Pure: ``now`` is an argument.

``report`` checks what the script says of one step. ``phases`` divides a script's time. ``interval`` adds steps up and
combines workers. ``interval_lines`` writes an interval as a line for the launcher, and ``progress_line`` as a line for
people.
"""
