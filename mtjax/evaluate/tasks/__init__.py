"""The tasks of `mtjax evaluate`: what is asked of a model, and what its answers come to."""
