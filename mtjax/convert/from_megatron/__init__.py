"""`mtjax from-megatron`: the settings of a run from Megatron-LM's launch script or arguments; no code is executed."""
