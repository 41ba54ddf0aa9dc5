"""Malformed input for every decoder, and what a decoder may do with it."""
