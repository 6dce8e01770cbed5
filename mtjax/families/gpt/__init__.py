"""GPT and Llama: decoders."""
