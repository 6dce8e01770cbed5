"""Types of transformers: what their tables are made of, and the registry. The tables are in `mtjax/families`."""
