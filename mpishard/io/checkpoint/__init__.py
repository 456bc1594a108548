"""Checkpoints: saved from any mesh, loaded onto any other."""
