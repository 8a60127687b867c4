"""The state of one speculative step of a request."""
