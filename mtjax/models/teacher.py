"""What a teacher adds to a batch, and the losses that read it."""

TEACHER, TEACHER_TABLE = "teacher", "teacher_table"
"""Arrays of a batch: a teacher's final hidden states and its output table; in finetuning, its outputs alone."""
HARD, SOFT = "hard_loss", "soft_loss"
"""Losses of distillation: cross-entropy with the labels, and with the teacher's probabilities."""
