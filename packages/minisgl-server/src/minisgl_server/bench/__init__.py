"""Commands `minisgl bench`: offline, serve, attention, accuracy and trace."""
