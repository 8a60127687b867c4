"""Training of draft heads on the states of a frozen target."""
