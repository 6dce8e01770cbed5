"""What a model needs and on which mesh: reports from `mtjax.theory`'s formulas, and the mesh search."""
