"""`python -m collx tune`: measures the algorithms on this machine and writes a tuning table."""
