"""Scheduling and KV blocks, pure: time is an argument, nothing is done, only decided."""
