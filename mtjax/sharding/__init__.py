"""Meshes, shardings, collectives and distributed gradients: the only package above `theory` that names mesh axes."""
