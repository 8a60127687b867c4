"""Records of runs: a manifest, a line for each turn, and dumps of failures."""
