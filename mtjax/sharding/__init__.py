"""The only place above `theory` that names mesh axes: devices, placement, collectives, gradients over ranks."""
