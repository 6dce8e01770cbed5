"""The processes of a run: starting them, exchanging texts, stopping on a signal, and detecting lost ones."""
