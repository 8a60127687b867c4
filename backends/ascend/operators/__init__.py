"""The Ascend operators by their documented contract, emulated on the CPU."""
