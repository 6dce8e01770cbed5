"""The parts of each family's models."""
