"""What tests and benchmarks share: named cases, and the rule of what counts as correct."""
