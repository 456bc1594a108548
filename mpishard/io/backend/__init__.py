"""The ways in which one file is written by all ranks."""
