"""Events and effects of the scheduler's machines, and the records that they keep."""
