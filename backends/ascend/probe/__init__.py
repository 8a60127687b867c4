"""The contract probe: calls that satisfy and that break each rule, made on a device."""
