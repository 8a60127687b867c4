"""Checkpoints of `--model`: opening of directories, and cases made from prompts."""
