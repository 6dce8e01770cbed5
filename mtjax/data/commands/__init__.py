"""The `mtjax data` commands, a module each."""
