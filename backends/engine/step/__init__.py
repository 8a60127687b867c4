"""The state of one speculative step of a request, from its drafted tree to its emitted tokens."""
