"""What is measured: masks, lengths, models, and the grids of cases made of them."""
