"""Options of the user, their resolution, and the model's config."""
