"""The heads that can be trained."""
