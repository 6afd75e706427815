"""The plan of a kernel for a mask: tiles, the runs of blocks in each, their order.

Knows nothing of the code of kernels.
"""
