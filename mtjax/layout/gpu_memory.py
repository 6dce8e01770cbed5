"""How much of a GPU's memory a run may take."""

USABLE_MEMORY = 0.9
"""Share of a GPU's memory that jax may take, that the planner's plans may fill, and within which a compiled program
fits. The rest is left to CUDA and NCCL."""
