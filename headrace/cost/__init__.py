"""Seconds, bytes and money of what the engine does."""
