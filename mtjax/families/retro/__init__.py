"""Retro: a decoder that reads neighbours of its text."""
