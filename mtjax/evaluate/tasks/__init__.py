"""The tasks of `mtjax evaluate`: their rows, and results computed from scores."""
