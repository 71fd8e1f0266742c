"""Checkpoints and model declarations."""
