"""What the user asks for (`options`) and what the checkpoint says of itself (`model`)."""
