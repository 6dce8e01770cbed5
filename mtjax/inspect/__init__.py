"""Inspector of compiled steps: compile for a target, read the HLO, check it against the contract, report."""
