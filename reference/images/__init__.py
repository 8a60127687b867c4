"""Blocks of a prompt whose tokens have positions on time, height and width."""
