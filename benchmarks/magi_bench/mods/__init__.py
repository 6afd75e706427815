"""`magi-bench mods`: what users of FlexAttention write as mask_mod and score_mod, ours beside FlexAttention."""
