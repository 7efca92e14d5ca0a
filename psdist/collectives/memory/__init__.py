"""Memory that the ranks of a group share on one host: its exchange, and the thread that moves data through it."""
