"""Training: the step, the loop around it, and what a run leaves behind."""
