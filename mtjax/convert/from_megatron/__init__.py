"""`mtjax from-megatron`: translates Megatron-LM's launch script or arguments to a config, without executing code."""
