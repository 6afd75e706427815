"""Score programs: a score_mod as a program that any kernel can read: `program.py`, read from a function by
`read.py`."""
