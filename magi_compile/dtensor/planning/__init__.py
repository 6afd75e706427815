"""Planning, on the host and without communication: which rank holds which tokens, which rows travel, and when."""
