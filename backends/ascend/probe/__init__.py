"""The contract probe: for each rule, calls that satisfy and that break it.

The probe makes the calls on a device; tests make the same calls on the emulation.
"""
