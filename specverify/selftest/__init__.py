"""The self-test: each planted fault must be found, and clean runs must stay clean."""
