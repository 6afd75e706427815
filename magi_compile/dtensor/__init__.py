"""Context parallelism: which rank holds what, who sends what to whom, and attention across ranks."""
