"""Checkpoints on the command line: model directories are opened, and cases made from prompts."""
