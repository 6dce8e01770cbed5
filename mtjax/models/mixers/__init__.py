"""Mixers, the sublayers of a layer: one file each. A mixer reads the residual stream and adds to it."""
