"""Masks that several tests of this directory share."""

from magi_compile.testing.cases import varlen


def documents(lengths, causal):
    return varlen("documents", lengths, int(causal)).slices()
