"""Trained weights behind HTTP: OpenAI's completions and chats, and Megatron-LM's `PUT /api` (docs/serve.md)."""
