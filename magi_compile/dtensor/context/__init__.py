"""Context parallelism for a model as it is: attention inside of a block of code runs over all ranks."""
