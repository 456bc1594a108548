"""Persistent exchanges with the ranks beside, and the window fetch made of them."""
