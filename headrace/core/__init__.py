"""The pure core: scheduler, KV blocks and prefix index. Standard library only, no clock, no I/O."""
