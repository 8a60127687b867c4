"""The self-test: every planted fault is hunted among drawn cases, and clean runs stay clean."""
