"""A run's folder: choosing and locking it, and the log files in it."""
