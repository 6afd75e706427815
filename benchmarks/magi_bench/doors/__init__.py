"""`magi-bench doors`: training steps of other frameworks' models, with each attention that they offer."""
