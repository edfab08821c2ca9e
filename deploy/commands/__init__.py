"""The commands of `stallfree`, one a file."""
