"""The draft service: proposes token chains from the hidden states of the target."""
