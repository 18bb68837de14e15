"""The scheduler: which requests run together, and who owns which page. Pure Python and numpy; never touches a device."""
