"""Transport: moves the rows that a plan names between ranks. `collectives` is the contract."""
