"""Commands that explain a run or a machine: its history, and what is wrong with its set-up."""
