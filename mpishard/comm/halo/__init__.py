"""Halos of ghosted arrays, refreshed in place."""
