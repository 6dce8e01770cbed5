"""T5: an encoder and a decoder."""
