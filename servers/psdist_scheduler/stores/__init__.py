"""Stores: where the scheduler keeps the state that the next one needs."""
