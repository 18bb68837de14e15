"""The contracts that providers implement, one module per kind.

Import the module of the kind that you implement; nothing is re-exported here, so that listing plugins needs no torch.
"""
