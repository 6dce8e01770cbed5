"""What benchmarks/gpu.py runs: parts (parts.py), each in processes and a time of its own (runner.py)."""
