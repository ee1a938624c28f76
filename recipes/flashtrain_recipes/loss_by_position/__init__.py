"""How well a language model predicts a token, by the token's position in its document."""
