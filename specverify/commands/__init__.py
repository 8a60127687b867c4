"""The commands: options and arguments of each, and what it runs."""
