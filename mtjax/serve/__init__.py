"""HTTP serving: OpenAI's completions and chat completions, and Megatron-LM's `PUT /api` (docs/serve.md)."""
