"""Coming from other tools: what Megatron-LM, Hugging Face, MaxText and OpenAI call the settings of mtjax.

One table of Megatron-LM's arguments (`megatron.py`) is behind the conversion of its checkpoints, `mtjax from-megatron`,
the suggestions of the command line and docs/migrate.md.
"""
