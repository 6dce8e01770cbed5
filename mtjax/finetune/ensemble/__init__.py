"""`mtjax ensemble`."""
