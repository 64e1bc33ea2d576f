"""Beside the user's function in a tune run: slice by slice, one trial after the other in a warm process."""
