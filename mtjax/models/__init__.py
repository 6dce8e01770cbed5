"""Models, written once with logical axis names; where an array lives is decided in `mtjax.sharding`."""
