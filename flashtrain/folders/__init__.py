"""What a run leaves on disk: its folder, who holds it, and what is exported into it."""
