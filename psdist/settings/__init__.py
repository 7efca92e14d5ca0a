"""Settings and exit statuses of the programs: flags and environment variables."""
