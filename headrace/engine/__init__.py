"""The loop that joins scheduler and back-end; the engine process; the offline API."""
