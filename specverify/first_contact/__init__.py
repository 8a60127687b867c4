"""The first minutes on a new machine: parts in the order of what each tells in a second, written as they end."""
