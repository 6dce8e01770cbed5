"""The implementation of benchmarks/gpu.py: parts (parts.py), each in its processes and time limit (runner.py)."""
