"""Names of mtjax's settings in Megatron-LM, Hugging Face, MaxText and OpenAI's API.

One table of Megatron-LM's arguments (`megatron.py`) is used by the conversion of checkpoints, `mtjax from-megatron`,
the suggestions of the command line and docs/migrate.md.
"""
