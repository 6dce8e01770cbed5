"""Text generation: prefill, decode, sampling and continuous batching."""
