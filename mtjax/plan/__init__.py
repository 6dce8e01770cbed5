"""What a model needs and on which mesh: the formulas, the hardware table, the scaling model and the mesh search."""
