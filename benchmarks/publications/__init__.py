"""What others published about schedulers, one publication a file; `benchmarks/published.py` runs them."""
