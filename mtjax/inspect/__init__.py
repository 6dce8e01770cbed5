"""What a compiled step sends, needs and takes: compile for a target, read the HLO, check it against theory, report."""
