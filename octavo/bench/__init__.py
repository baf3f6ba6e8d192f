"""Measurements a user can run: `serve`, `throughput`, `step`, `kernels`. One JSON form, one table, one plot."""
