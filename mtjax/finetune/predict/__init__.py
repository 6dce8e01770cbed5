"""`mtjax predict`."""
