"""The pages a person reads at 80 columns."""
