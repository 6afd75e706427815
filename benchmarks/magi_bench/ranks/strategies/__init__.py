"""The context-parallel strategies of the field: each is a placement of tokens, a local kernel and moves.

`placement.py` says who holds which tokens and what an owner's queries see of another owner's keys; `kernels.py` and
`varlen.py` attend on one rank; `transport.py` moves rows; `attention.py` puts them together, differentiable;
`schedule.py` is HybridCP's; `contenders.py` are the strategies by name.
"""
