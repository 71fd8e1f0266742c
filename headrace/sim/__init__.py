"""The engine's scheduler on a virtual clock."""
