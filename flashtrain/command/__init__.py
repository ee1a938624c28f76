"""From words on a command line to checked settings, a sweep, or help."""
