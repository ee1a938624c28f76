"""Find, read and write files: safe reading, atomic writing, caches."""
