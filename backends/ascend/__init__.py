"""Ascend: attention by its operators, and an emulation of them on the CPU.

The operators are known by their documented contract (`operators/`). A probe (`probe/`) runs the calls that test the
contract on a device.
"""
