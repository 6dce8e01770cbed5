"""A loop over layers whose communication overlaps the computation of the neighbouring layers."""
