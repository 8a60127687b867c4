"""Trees lowered by tensor operations, and masks as words of bits."""
