"""Functions of indices, mask_mods and score_mods alike: reading one, as a graph and as text,
and running it at many points."""
