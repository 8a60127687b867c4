"""The structures in which drafts look tokens up."""
