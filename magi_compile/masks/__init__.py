"""What may attend to what. Knows nothing of tiles, kernels or torch.compile."""

from magi_compile.masks.slices import AttnSlice, AttnSlices, MaskType

__all__ = ["AttnSlice", "AttnSlices", "MaskType"]
