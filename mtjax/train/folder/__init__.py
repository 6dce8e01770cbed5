"""A run's folder: which one it is, who holds it, and the files that grow in it."""
