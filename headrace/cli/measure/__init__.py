"""`headrace bench limits | kernels | latency | throughput`: this machine, from inside the
process."""
