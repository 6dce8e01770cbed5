"""Finetuning of pretrained weights: tasks with a head and metrics, and chats. `mtjax.train` runs the training loop."""
