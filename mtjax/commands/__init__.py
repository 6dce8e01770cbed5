"""The commands: the only package that may import everything."""
