"""Models, written once with logical axis names; `mtjax.sharding` decides how arrays are sharded."""
