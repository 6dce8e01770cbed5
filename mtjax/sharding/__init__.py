"""Meshes, shardings, collectives and distributed gradients: the only package above `layout` that names mesh axes."""
