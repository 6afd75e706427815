"""What is measured: masks, lengths, models, and the grids of cells made of them."""
