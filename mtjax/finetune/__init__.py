"""Pretrained weights learn a task: rows of a file, a head, the task's own metrics. `mtjax.train` runs the steps."""
