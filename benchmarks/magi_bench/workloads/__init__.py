"""Masks, lengths, models, and the grids of cases made of them."""
