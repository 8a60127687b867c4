"""What one request of a session has of its own."""
