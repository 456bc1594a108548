"""Collectives on tensors, blocking and not, and what travels between layouts."""
