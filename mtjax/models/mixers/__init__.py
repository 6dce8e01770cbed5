"""What a layer is a row of: each file is a mixer, which reads the residual stream and adds to it."""
