"""What a request says, and the response to it."""
