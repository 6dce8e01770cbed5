"""Kernels of attention, one file per implementation, and of experts."""
