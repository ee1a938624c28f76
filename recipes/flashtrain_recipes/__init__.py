"""The experiments: published results reproduced, and things measured. They stand on flashtrain."""
