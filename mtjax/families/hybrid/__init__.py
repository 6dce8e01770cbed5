"""Hybrid models: decoders whose layers are of several kinds."""
