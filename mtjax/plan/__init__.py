"""Planner: reports on a model and a mesh from `mtjax.theory`'s formulas, and the mesh search."""
