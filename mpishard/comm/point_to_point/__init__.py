"""Messages between single ranks."""
