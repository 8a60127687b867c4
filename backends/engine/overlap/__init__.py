"""The parts of overlapped scheduling: what a launched step holds and reserves."""
