"""Commands `minisgl bench`: offline, serve, attention, accuracy, route, scheduler and trace."""
