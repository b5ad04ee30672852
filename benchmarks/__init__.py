"""Benchmarks: each module prints a table and the command that made it. Times are of the machine they ran on; ratios carry over."""
