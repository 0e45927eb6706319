"""Runnable experiments: one short script per kind of run, each `main(config)`."""
