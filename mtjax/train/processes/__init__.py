"""The processes of a run: how they start, speak, stop on a signal, and notice that one is lost."""
