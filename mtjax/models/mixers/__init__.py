"""Mixers, the sublayers of a layer: one file each. A mixer reads hidden states, and its output is added to them."""
