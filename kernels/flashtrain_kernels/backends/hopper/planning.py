"""The tile sizes that masks are planned for where the Hopper kernels serve the calls: queries and keys a tile."""

from .backward import KEYS, QUERIES

# Measured with documents (kernels/OPTIMISATION.md): small tiles waste least at the documents' borders.
FORWARD = (64, 64)
BACKWARD = (QUERIES, KEYS)
