"""`magi-bench first`: the first call of a compiled FlexAttention, in fresh processes with empty caches."""
