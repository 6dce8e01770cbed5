"""Conversion of weights to and from Hugging Face's safetensors and Megatron-LM's checkpoints (docs/convert.md)."""
