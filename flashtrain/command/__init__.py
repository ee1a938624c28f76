"""The command line: its words become checked settings, a sweep, or help."""
