"""What a worker measures and reports while it trains: the clock of its calls, and the way of metrics to trackers and to
the launcher."""
