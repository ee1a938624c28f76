"""Files: reading what is not trusted, and writing so that nothing is lost."""
