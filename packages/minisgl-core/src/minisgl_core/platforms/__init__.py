"""The devices that minisgl runs on by itself."""
