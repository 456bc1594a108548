"""What viewers are told of a file."""
