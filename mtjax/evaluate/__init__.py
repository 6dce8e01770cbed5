"""Zero-shot evaluation: log-probabilities and greedy accuracy of given texts, and tasks of lm-eval."""
