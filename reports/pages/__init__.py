"""The pages that a person reads on a terminal."""
