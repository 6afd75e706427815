"""Mask expressions: what they mean, how they print, and their values on integers and bounds."""
