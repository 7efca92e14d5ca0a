"""The dashboard: one page that shows the run live, served in a thread of its own."""
