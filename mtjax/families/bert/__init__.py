"""BERT: encoders."""
