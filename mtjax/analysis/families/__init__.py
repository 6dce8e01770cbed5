"""Components of each family's models."""
