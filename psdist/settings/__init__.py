"""What programs are told when they start, and what they end with: flags, environment variables, exit statuses."""
