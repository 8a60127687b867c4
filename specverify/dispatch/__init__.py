"""The command `dispatch`: it learns a table of static trees by batch size."""
