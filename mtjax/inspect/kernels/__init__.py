"""What a program's GPU kernels do, read from their machine code."""
