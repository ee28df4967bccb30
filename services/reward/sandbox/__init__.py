"""Runs programs that nobody trusts. What is covered and what is not is listed in ``pool.py``."""
