"""The parts that decoder models are built of, sharded over tensor-parallel ranks.

Every layer takes a `BuildContext`, allocates this rank's part, and says by `weight_targets` which slice of which checkpoint
tensor goes where. `decoder.DecoderModel` puts them together; a new architecture overrides what differs.
"""
