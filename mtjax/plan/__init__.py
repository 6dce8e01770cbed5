"""Planner: reports on a model and a mesh from `mtjax.analysis`'s formulas, and the mesh search."""
