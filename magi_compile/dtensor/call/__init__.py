"""One attention of one rank: the ops, what they are asked for, and the passes."""
