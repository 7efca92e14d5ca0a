"""The arithmetic of updates, the arrays that it works on, and the threads that run it."""
