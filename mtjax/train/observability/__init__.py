"""Monitoring of a run: where its time goes, its metrics, its progress, and whether its devices compute correctly."""
