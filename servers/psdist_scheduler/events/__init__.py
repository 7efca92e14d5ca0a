"""Events and effects of the scheduler's machines, and the state that they share."""
