"""What training, serving and evaluation share: processes, checkpoints, compiled programs."""
