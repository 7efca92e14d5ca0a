"""The arithmetic of updates, its arrays, and the threads that run it."""
